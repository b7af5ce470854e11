"""Short calls of a layer, prepared once: one compiled call without gradients, one autograd function with them.

A call of a layer through modules, solver and dispatcher takes ten times as long as a step itself. Here everything that
follows from the structure of the layer is kept, and each call checks that the structure is the same: modules, hooks,
parameters and attributes. Values are never assumed: the kernel reads the matrices as they are, and compares the bytes
of the small parameters from which eigenvalues, gain and β were evaluated. With gradients these are evaluated at every
call, since autograd needs them as a part of its graph.
"""

import operator
import threading
import weakref
from itertools import chain
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module

from ..cells.adpt import ADPTCell
from ..cells.base import ADPTState
from ..ops import _build, _gpu, adpt_layer
from ..ops._torch_state import can_bypass_dispatcher, is_autocast_enabled
from ..ops.adpt_layer import (
    Evaluated,
    GateWeights,
    LayerCall,
    LayerVectors,
    LayerWeights,
    LinearizedVectors,
    TrainingCall,
    VectorSource,
)
from ..ops.adpt_scan import Form
from ..ops.products import has_bfloat16_products
from ..recurrence.beta import Beta
from ..recurrence.drive import EMA, LRU, ZOH, Drive, Gain
from ..recurrence.drive.drive import is_scaling_faster
from ..recurrence.drive.gate import Gate
from ..recurrence.projections.base import Biased, apply_map
from ..recurrence.projections.dense import DenseProjection
from ..recurrence.projections.heads import Heads
from ..recurrence.projections.identity import IdentityProjection
from .tied_gain import TiedGain

__all__ = ["ModuleWatch", "PreparedLayer", "find_prepared", "run_short_call"]

MAX_WORK = 16_000_000  # multiplications up to which one thread is faster with unpacked weights
MAX_STEPS = 16  # longer sequences are computed in the same order with and without autograd, and so round alike
_GLOBAL_HOOKS = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_DICTS = ("_parameters", "_buffers", "_modules", *_HOOKS)


class ModuleWatch:
    """The structure of a module at one time: its submodules, their attributes, hooks, parameters and buffers.

    Args:
        module: The module. Its submodules are kept alive, the module itself is not.
    """

    def __init__(self, module: nn.Module):
        self._parts = [part for part in module.modules() if part is not module]
        self._types = [type(part) for part in self._parts]
        self._attributes = [part.__dict__ for part in self._parts]
        self._values = self._read_values()
        own = module.__dict__
        self._own_type, self._own_count = type(module), len(own)
        dicts = [attributes[name] for attributes in (own, *self._attributes) for name in _DICTS]
        self._empty, self._filled = [part for part in dicts if not part], [part for part in dicts if part]
        self._contents = self._read_contents()
        self.has_hooks = any(attributes[name] for attributes in self._attributes for name in _HOOKS)
        self.has_plain_tensors = any(isinstance(value, Tensor) for values in self._values for value in values)

    def is_unchanged(self, module: nn.Module) -> bool:
        """Return whether the structure of `module` is the one that was recorded.

        Args:
            module: The module.
        """
        if type(module) is not self._own_type or len(module.__dict__) != self._own_count or any(self._empty):
            return False
        contents = self._read_contents()
        if len(contents) != len(self._contents) or not all(map(operator.is_, contents, self._contents)):
            return False
        try:
            return list(map(type, self._parts)) == self._types and self._read_values() == self._values
        except Exception:  # an attribute was replaced by one that has no simple comparison
            return False

    def _read_contents(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._filled))]

    def _read_values(self) -> list[tuple[Any, ...]]:
        return [tuple(attributes.values())[1:] for attributes in self._attributes]  # the first is `training`


class PreparedLayer:
    """A layer whose short calls run in one compiled call.

    Args:
        cell: Its cell.
        readout: Its read-out.
        form: The form of the recurrence.
        weights: The matrices of a call.
    """

    def __init__(self, cell: ADPTCell, readout: nn.Module | None, form: Form, weights: LayerWeights):
        self._cell, self._readout, self._form, self._weights = cell, readout, form, weights
        modules = (cell.spectrum, cell.drive.gain, cell.beta)
        sources = [*dict.fromkeys(t for module in modules for t in chain(module.parameters(), module.buffers()))]
        self._tensors = [*weights.tensors(), *sources]
        with torch.no_grad():
            vectors = self._evaluate()
        # A linear recurrence does not use K and V, but its kernel with gradients gives them gradients of zero.
        unused = weights._replace(directions=(), direction_biases=()) if form.linear else weights
        self.call = LayerCall(form, unused, vectors, sources)
        self.can_train = vectors.gain_imag is None
        # In closed form if β is fixed and all parameters have the dtype of the layer, otherwise by the modules.
        in_dtype = all(t.dtype == self.call.dtype for t in sources)
        closed = TiedGain.find_parameters(cell.spectrum, cell.drive.gain) if in_dtype else None
        self._parameters = closed if cell.beta.parameter is None else None
        tied = self._parameters
        self._source: VectorSource = Evaluated() if tied is None else TiedGain(cell.drive.gain, vectors.beta, len(tied))
        self._linearized: LinearizedVectors | None = None  # at the values of the parameters that `call` has copied
        self._training = TrainingCall(form, weights, self._source)
        matrices = (weights.input_weight, *weights.directions, weights.readout_weight)
        self._work = max(1, sum(t.numel() for t in matrices if t is not None))

    def is_short(self, rows: int) -> bool:
        """Return whether a call is so short that it is not worth packing weights or starting threads for it.

        Args:
            rows: Number of sequences times number of steps.
        """
        return rows <= 2 or rows * self._work * torch.get_num_threads() <= MAX_WORK

    def requires_grad(self) -> bool:
        """Return whether a parameter requires a gradient."""
        return True in [t.requires_grad for t in self._tensors]

    def run(self, x: Tensor, initial: Tensor | None, final: Tensor) -> Tensor:
        """Run the layer, see `LayerCall.run`; evaluate vectors again if their parameters have changed."""
        outputs = self.call.run(x, initial, final)
        while outputs is None:
            self._update_vectors()
            outputs = self.call.run(x, initial, final)
        return outputs

    def run_training(self, x: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run the layer with gradients, with the same result as the general path.

        Args:
            x: (batch, steps, width).
            initial: The state before the first step, (batch, n); None for zeros.

        Returns:
            The outputs, and the state after the last step.
        """
        weights = self._weights
        plain = weights.input_weight is not None and weights.input_bias is None and weights.gate is None
        scale_weight = plain and is_scaling_faster(x)
        at = None if self._parameters is None else self._linearize(self._parameters)
        sources = self._evaluate() if self._parameters is None else self._parameters
        states, final = self._training.run(x, initial, sources, at, scale_weight=scale_weight)
        return states if self._readout is None else apply_map(self._readout, states), final

    def _update_vectors(self) -> None:
        with torch.no_grad():
            self.call.set_vectors(self._evaluate())
        self._linearized = None

    def _linearize(self, sources: list[Tensor]) -> LinearizedVectors:
        """Return the vectors at the present values of their sources, evaluated again only if these have changed."""
        if not self.call.is_current():
            self._update_vectors()
        if self._linearized is None:
            with torch.no_grad():
                self._linearized = self._source.linearize(sources)
        return self._linearized

    def _evaluate(self) -> LayerVectors:
        cell, form = self._cell, self._form
        blocks = cell.spectrum()
        real = blocks.real
        gain = cell.drive.gain(cell.spectrum)
        if not form.rotates:
            return LayerVectors(real, blocks.imag, gain.real, gain.imag, None)
        beta = cell.beta(real)
        beta = beta.reshape(-1) if isinstance(beta, Tensor) else real.new_full((1,), beta)
        return LayerVectors(real, blocks.imag, gain.real, gain.imag, beta.expand(form.heads))


def prepare_layer(layer: nn.Module, watch: ModuleWatch) -> PreparedLayer | str:
    """Return a layer prepared for short calls, or the reason why the compiled call does not support it.

    Args:
        layer: The layer.
        watch: Its structure.
    """
    cell: Any = layer.cell
    if type(cell) is not ADPTCell:
        return f"the call is compiled for ADPT cells, not for {type(cell).__name__}"
    if watch.has_hooks or watch.has_plain_tensors:
        return "a module has hooks, or tensors that are not parameters"
    if not _build.kernels_enabled():
        return "ADPTNET_BACKEND=reference"
    backend = cell.choose_scan("cpu")
    if not backend.is_kernel:
        return backend.reason.removesuffix(".")
    drive, dtype, spec, form = cell.drive, cell.dtype, cell.spec, cell.recurrence.form
    unsupported = {
        f"direction={spec.direction}": form.directions_in_drive
        or form.dot is not None
        or form.norm_epsilon is not None
        or form.whole_state,
        "memory=": spec.memory is not None,
        "start=": cell.start is not None,
        "phase=": form.phased,
        f"conjugate={spec.conjugate}": form.planes > 1,
        "rope=": drive.rope is not None,
        f"gain={spec.gain}": type(drive.gain) is not Gain or type(drive.gain.spec) not in (EMA, LRU, ZOH),
        "a replaced module": type(drive) is not Drive
        or type(drive.gate) not in (NoneType, Gate)
        or type(cell.beta) is not Beta
        or not all(type(part).__module__.startswith("adptnet.") for part in cell.spectrum.modules()),
    }
    names = [name for name, holds in unsupported.items() if holds]
    if names:
        return f"the compiled call does not support {' and '.join(names)}"
    readout: Any = layer.readout
    weights = _find_weights(cell, readout, rotates=form.rotates)
    if weights is None:
        return "the compiled call needs dense projections, stored in the memory of a CPU in the dtype of the layer"
    if dtype is None or not adpt_layer.has_kernel(dtype):
        return f"there is no compiled call for {dtype}"
    return PreparedLayer(cell, readout, form, weights)


class _Map(NamedTuple):
    """A linear map: its matrix, None for the identity, and its bias, if it has one."""

    weight: Tensor | None
    bias: Tensor | None


def _find_map(module: nn.Module) -> _Map | None:
    """Return a linear map as a matrix and a bias; None if there is no stored matrix."""
    if type(module) is IdentityProjection:
        return _Map(None, None)
    bias: Any = None
    if type(module) is Biased:
        module, bias = module.projection, module.bias
    return _Map(module.weight, bias) if type(module) is DenseProjection else None


def _find_weights(cell: ADPTCell, readout: nn.Module | None, *, rotates: bool) -> LayerWeights | None:
    """Return the matrices of a layer; None if one is not a stored matrix in the memory of a CPU."""
    projections: list[nn.Module] = [cell.drive.input_projection]
    projections += [] if readout is None else [readout]
    if rotates:
        directions: Any = cell.directions[0]
        pair = [directions.key_projection, directions.value_projection]
        heads = [list(p.projections) if isinstance(p, Heads) else [p] for p in pair]
        projections += [projection for each in zip(*heads, strict=True) for projection in each]
    maps = [_find_map(projection) for projection in projections]
    found = [part for part in maps if part is not None]
    first, gate = 1 if readout is None else 2, cell.drive.gate
    matrices = [part.weight for part in found[first:] if part.weight is not None]
    if len(found) < len(maps) or len(matrices) < len(maps) - first:
        return None  # K and V are never the identity
    weights = LayerWeights(
        input_weight=found[0].weight,
        input_bias=found[0].bias,
        directions=tuple(matrices),
        direction_biases=tuple(part.bias for part in found[first:] if part.bias is not None),
        readout_weight=None if readout is None else found[1].weight,
        readout_bias=None if readout is None else found[1].bias,
        gate=None if gate is None else GateWeights(gate.down, gate.up, gate.bias),
    )
    tensors = [*weights.tensors(), *cell.parameters(), *cell.buffers()]
    return (
        weights
        if all(_is_plain(t) for t in tensors) and all(t.dtype == cell.dtype for t in weights.tensors())
        else None
    )


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the memory of a tensor can be read as an array."""
    if type(tensor) not in (Tensor, nn.Parameter) or not tensor.is_cpu or tensor.layout is not torch.strided:
        return False
    return tensor.is_contiguous() and not tensor.is_neg() and (not tensor.numel() or tensor.data_ptr() != 0)


class _Entry(NamedTuple):
    """Record of a layer: its structure, and its preparation or the reason why the compiled call does not support it."""

    watch: ModuleWatch
    prepared: PreparedLayer | str


class _Entries(threading.local):
    """The layers that this thread has called; not part of a layer, so that copies and files of it do not have them."""

    def __init__(self) -> None:
        self.by_layer: weakref.WeakKeyDictionary[nn.Module, _Entry] = weakref.WeakKeyDictionary()


_entries = _Entries()


def find_prepared(layer: nn.Module) -> PreparedLayer | str:
    """Return the layer prepared for short calls by this thread, or why the compiled call does not support it now.

    Args:
        layer: The layer.
    """
    entry = _entries.by_layer.get(layer)
    if entry is None or not entry.watch.is_unchanged(layer):
        watch = ModuleWatch(layer)
        entry = _entries.by_layer[layer] = _Entry(watch, prepare_layer(layer, watch))
    prepared = entry.prepared
    if not isinstance(prepared, str) and not prepared.call.is_valid():
        prepared = prepare_layer(layer, entry.watch)
        _entries.by_layer[layer] = _Entry(entry.watch, prepared)
    return prepared


def run_short_call(layer: nn.Module, x: Tensor, state: ADPTState | None) -> tuple[Tensor, ADPTState] | None:
    """Run a layer if the call is short, on a CPU, and nothing but its result and its gradients can observe it.

    Args:
        layer: The layer.
        x: (batch, time, width), or (batch, width) for one step.
        state: The state that an earlier call returned; None for the initial state.

    Returns:
        The outputs and the state; None if the call must take the general path, which also reports wrong arguments.
    """
    if torch.compiler.is_compiling() or not _gpu.is_cpu(x.device) or has_bfloat16_products():
        return None
    if not (state is None or isinstance(state, ADPTState)):
        return None
    given = (x,) if state is None else (x, *state)
    if not can_bypass_dispatcher(*given) or forward_ad._current_level >= 0 or any(_GLOBAL_HOOKS):
        return None
    shape = x.shape
    batch, steps = shape[0], shape[1] if len(shape) == 3 else 1
    rows = batch * steps
    if not rows or steps > MAX_STEPS or rows > MAX_WORK or x.layout is not torch.strided:
        return None
    prepared = find_prepared(layer)
    if isinstance(prepared, str) or not _build.kernels_enabled():
        return None
    call = prepared.call
    if x.dtype != call.dtype or shape[-1] != call.input_size:
        return None
    initial = None
    if state is None:
        position = torch.full((batch,), steps, dtype=torch.int64, device="cpu")
    else:
        initial, position = state
        if initial.shape != (batch, call.state_size) or initial.dtype != call.dtype or not initial.is_cpu:
            return None
        if position.shape != (batch,) or position.dtype != torch.int64 or not position.is_cpu:
            return None
        position = position + steps
    if torch.is_grad_enabled() and (True in [t.requires_grad for t in given] or prepared.requires_grad()):
        if not prepared.can_train or is_autocast_enabled(x.device):
            return None
        outputs, final = prepared.run_training(x if len(shape) == 3 else x.unsqueeze(1), initial)
        return outputs if len(shape) == 3 else outputs.squeeze(1), ADPTState(final, position)
    if not prepared.is_short(rows):
        return None
    final = torch.empty((batch, call.state_size), dtype=call.dtype, device="cpu")
    initial = None if initial is None else _as_array(initial)
    return prepared.run(_as_array(x), initial, final), ADPTState(final, position)


def _as_array(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_contiguous() and not tensor.is_neg() else tensor.resolve_neg().contiguous()
