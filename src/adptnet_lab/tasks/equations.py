"""Parsing of ordinary differential equations given as text. The text is never executed as Python code."""

import ast
import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from adptnet.errors import InputError

__all__ = ["Field", "parse_equations"]

Numbers = npt.NDArray[np.float64]
Field = Callable[[Numbers], Numbers]  # (..., n) to (..., n)

_FUNCTIONS: dict[str, Callable[[Numbers], Numbers]] = {
    name: getattr(np, name) for name in ("sin", "cos", "tan", "exp", "log", "sqrt", "tanh", "abs", "sign")
}
_OPERATORS: dict[type[ast.operator], Callable[[Numbers, Numbers], Numbers]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.divide,
    ast.Pow: np.power,
}
_EXAMPLE = "x' = 10*(y - x); y' = x*(28 - z) - y; z' = x*y - 8/3*z"


def parse_equations(text: str) -> tuple[tuple[str, ...], Field]:
    """Parse equations such as "x' = v; v' = -x - 0.1*v".

    Args:
        text: One equation for each variable, separated by semicolons or line breaks.

    Returns:
        The names of the variables, and the right-hand side as a function of the state (..., n).

    Raises:
        InputError: The text is not a system of equations; the message says what is accepted.
    """
    equations = []
    for line in re.split(r"[;\n]", text):
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)'\s*=(.+)", line)
        if match is None and line.strip():
            raise InputError(f"{line.strip()!r} is not an equation. Write them as: {_EXAMPLE}")
        if match is not None:
            equations.append((match[1], match[2].strip()))
    names = tuple(name for name, _ in equations)
    if not names or len(set(names)) < len(names):
        raise InputError(f"{text!r} needs one equation for each variable. Write them as: {_EXAMPLE}")
    sides = [_compile(_parse_formula(side), {name: i for i, name in enumerate(names)}, side) for _, side in equations]

    def field(state: Numbers) -> Numbers:
        return np.stack([np.broadcast_to(side(state), state.shape[:-1]) for side in sides], -1)

    return names, field


def _parse_formula(text: str) -> ast.expr:
    try:
        return ast.parse(text.replace("^", "**"), mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        raise InputError(f"{text!r} cannot be parsed as a formula. Write it as: 10*(y - x)") from None


def _compile(node: ast.expr, variables: dict[str, int], text: str) -> Field:
    """Return a function of the state for a formula of numbers, variables, + - * / ** and a few functions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        number = np.asarray(float(node.value))
        return lambda state: number
    if isinstance(node, ast.Name) and node.id in variables:
        index = variables[node.id]
        return lambda state: state[..., index]
    if isinstance(node, ast.Name) and node.id == "pi":
        return lambda state: np.asarray(np.pi)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        inner = _compile(node.operand, variables, text)
        return inner if isinstance(node.op, ast.UAdd) else lambda state: -inner(state)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        operator = _OPERATORS[type(node.op)]
        left, right = _compile(node.left, variables, text), _compile(node.right, variables, text)
        return lambda state: operator(left(state), right(state))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1 and not node.keywords:
        function, argument = _FUNCTIONS.get(node.func.id), _compile(node.args[0], variables, text)
        if function is not None:
            return lambda state: function(argument(state))
    raise InputError(
        f"{ast.unparse(node)!r} in {text!r} is unknown. A formula may contain numbers, pi, the variables "
        f"{', '.join(variables)}, + - * / **, and {', '.join(_FUNCTIONS)}."
    )
