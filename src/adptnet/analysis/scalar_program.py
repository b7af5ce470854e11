"""A map of a few state dimensions as a program of Python numbers, for long trajectories.

An operation of torch on three numbers takes a microsecond or two, almost all of it overhead; the same operation on
Python numbers takes a twentieth of that. A function is run once, its operations are recorded, and each is expanded into
operations on single numbers. Views become index arithmetic and cost nothing.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ScalarProgram", "record_program"]

MAX_INSTRUCTIONS = 2000
INSTRUCTIONS_PER_OPERATION = 8  # with more, torch is as fast
_aten: Any = torch.ops.aten
Instruction = tuple[Callable[[Any, Any], Any], int, int]

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "rsub": lambda a, b: b - a,
    "mul": operator.mul,
    "div": operator.truediv,
}
_UNARY: dict[str, Callable[[Any, Any], Any]] = {
    "neg": lambda a, _: -a,
    "square": lambda a, _: a * a,
    "abs": lambda a, _: abs(a),
    "sin": lambda a, _: math.sin(a),
    "cos": lambda a, _: math.cos(a),
    "tanh": lambda a, _: math.tanh(a),
}


class ScalarProgram:
    """The operations of a map on single numbers. Each instruction reads two registers and appends one.

    Args:
        constants: The registers before the first instruction, after the arguments: the constants of the program.
        instructions: The instructions.
        results: The registers of the result.
    """

    def __init__(self, constants: list[float], instructions: list[Instruction], results: list[int]):
        self.constants, self.instructions, self.results = constants, instructions, results

    def __call__(self, arguments: list[float]) -> list[float]:
        """Return the result of the map.

        Args:
            arguments: The entries of all its arguments, one after another.

        Raises:
            ArithmeticError, ValueError: A number has no result here, such as a division by zero.
        """
        registers = [*arguments, *self.constants]
        append = registers.append
        for function, a, b in self.instructions:
            append(function(registers[a], registers[b]))
        return [registers[i] for i in self.results]


def record_program(function: Callable[..., Tensor], *arguments: Tensor) -> ScalarProgram | None:
    """Return the program of a function; None if it has an operation that is not supported, or torch is as fast.

    Args:
        function: A function of tensors whose operations do not depend on values.
        arguments: Arguments to run it with once. Tensors that it reads beside them are constants of the program.
    """
    recorder = _Recorder(arguments)
    with torch.no_grad(), recorder:
        result = function(*arguments)
    program = recorder.finish(result)
    if program is None:
        return None
    try:
        found = torch.tensor(program([x for t in arguments for x in t.tolist()]), dtype=torch.float64)
    except (ArithmeticError, ValueError):
        return None
    tolerance = 64 * torch.finfo(result.dtype).eps
    return program if torch.allclose(found, result.double(), rtol=tolerance, atol=tolerance) else None


class _Recorder(TorchDispatchMode):
    """Records operations as instructions. The value of a tensor is an array of the registers of its entries."""

    def __init__(self, arguments: tuple[Tensor, ...]):
        super().__init__()  # type: ignore[no-untyped-call]
        count = sum(t.numel() for t in arguments)
        registers = iter(np.split(np.arange(count), np.cumsum([t.numel() for t in arguments])[:-1]))
        self.values = {id(t): next(registers).reshape(t.shape) for t in arguments}
        self.kept: list[Any] = [*arguments]  # an id is unique only while its tensor is alive
        self.argument_count = count
        self.constants: list[float] = []
        self.constant_registers: dict[tuple[float, float], int] = {}
        self.instructions: list[tuple[Callable[[Any, Any], Any], Any, Any]] = []
        self.operations = 0
        self.dtype = arguments[0].dtype
        self.supported = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.kept.append((args, result))
        if self.supported:
            self.operations += 1
            value = self._record(func, args, kwargs or {}, result)
            if value is None or len(self.instructions) > MAX_INSTRUCTIONS:
                self.supported = False
            else:
                tensors = result if isinstance(result, (tuple, list)) else [result]
                self.values.update((id(t), v) for t, v in zip(tensors, value, strict=True))
        return result

    def finish(self, result: Any) -> ScalarProgram | None:
        """Return the program whose result is a given tensor."""
        few = len(self.instructions) <= INSTRUCTIONS_PER_OPERATION * max(1, self.operations)
        if not self.supported or not few or not isinstance(result, Tensor) or id(result) not in self.values:
            return None
        # Constants are found while instructions are recorded, but their registers come first.
        first, shift = self.argument_count, len(self.constants)

        def place(register: int) -> int:
            if register < 0:  # the constant -1 - register
                return first - 1 - register
            return register if register < first else register + shift

        instructions = [(function, place(a), place(b)) for function, a, b in self.instructions]
        return ScalarProgram(self.constants, instructions, [place(i) for i in self.values[id(result)].ravel().tolist()])

    def _record(self, func: Any, args: Any, options: dict[str, Any], result: Any) -> list[Any] | None:
        """Return the registers of each resulting tensor; None if the operation is not supported."""
        packet, name = func.overloadpacket, func.overloadpacket.__name__
        tensors = result if isinstance(result, (tuple, list)) else [result]
        if any(not isinstance(t, Tensor) or t.dtype != self.dtype for t in tensors) or options.keys() - {"alpha"}:
            return None
        first = self._find(args[0]) if args else None
        if first is None:
            return None
        if name in _BINARY and len(args) == 2:
            second = self._find(args[1])
            if second is not None and "alpha" in options:
                second = self._apply(operator.mul, second, self._constant(options["alpha"]))
            return None if second is None else [self._apply(_BINARY[name], first, second)]
        if name in _UNARY and len(args) == 1:
            return [self._apply(_UNARY[name], first, first)]
        if packet is _aten.pow and args[1] in (2, 3):
            square = self._apply(operator.mul, first, first)
            return [square if args[1] == 2 else self._apply(operator.mul, square, first)]
        if packet is _aten.unbind:
            return [*np.moveaxis(first, args[1] if len(args) > 1 else 0, 0)]
        if packet is _aten.select:
            return [np.take(first, args[2], axis=args[1])]
        if packet is _aten.slice:
            dim, *bounds = args[1:] or (0,)
            return [np.moveaxis(np.moveaxis(first, dim, 0)[slice(*bounds)], 0, dim) if bounds else first]
        if packet in (_aten.view, _aten.unsqueeze, _aten._unsafe_view):
            return [first.reshape(tuple(result.shape))]
        if packet in (_aten.stack, _aten.cat):
            join = np.stack if packet is _aten.stack else np.concatenate
            return [join(first, axis=args[1] if len(args) > 1 else 0)]
        return None

    def _find(self, argument: Any) -> Any:
        """Return the registers of an argument; None if it has none."""
        if isinstance(argument, (list, tuple)):
            parts = [self._find(part) for part in argument]
            return None if any(part is None for part in parts) else parts
        if isinstance(argument, Tensor):
            if id(argument) not in self.values and argument.dtype == self.dtype and argument.numel() <= 64:
                flat = [self._constant(x) for x in argument.detach().reshape(-1).tolist()]
                self.values[id(argument)] = np.array(flat, dtype=int).reshape(argument.shape)
            return self.values.get(id(argument))
        if isinstance(argument, (int, float)) and not isinstance(argument, bool):
            return np.array(self._constant(argument))
        return None

    def _constant(self, number: float) -> Any:
        """Return the register of a constant: -1 for the first, -2 for the second, …, until all are known."""
        key = number, math.copysign(1.0, number)
        if key not in self.constant_registers:
            self.constants.append(float(number))
            self.constant_registers[key] = -len(self.constants)
        return self.constant_registers[key]

    def _apply(self, function: Callable[[Any, Any], Any], first: Any, second: Any) -> Any:
        """Record an operation for each entry and return the registers of the results."""
        first, second = np.broadcast_arrays(first, second)
        start = self.argument_count + len(self.instructions)
        self.instructions += [
            (function, a, b) for a, b in zip(first.ravel().tolist(), second.ravel().tolist(), strict=True)
        ]
        return np.arange(start, start + first.size).reshape(first.shape)
