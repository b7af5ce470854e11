"""The CPU kernel of `adpt_layer`: the ctypes structure of a call, filled once and used for every call of a layer."""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from .. import _backends, _buffers, _build
from .._structures import read_structure
from ..adpt_scan import Form, RetractionKind
from .form import DriveGradients, GateValues, LayerVectors, LayerWeights

__all__ = ["LayerCall", "compute_drive_gradients", "has_kernel"]

_SCALARS = {torch.float32: "float", torch.float64: "double"}


_FILES = {"Layer": "kernel.cpp", "DriveGradients": "drive_gradients.h"}


@functools.cache
def _mirror(name: str) -> Any:
    """Return the ctypes mirror of a structure in csrc."""
    return read_structure(Path(__file__).parent / "csrc" / _FILES[name], name)


def has_kernel(dtype: torch.dtype) -> bool:
    """Return whether there is a kernel for `dtype`. The first call builds it.

    Args:
        dtype: The dtype of the parameters.
    """
    return _backends.choose_cpu("adpt_layer", dtype).is_kernel


class LayerCall:
    """A layer prepared for short calls. It is not safe for use by several threads at once.

    All tensors are contiguous CPU tensors of one dtype, for which `has_kernel` is True. The weights and the sources are
    read at every call; `is_valid` says if they still have the memory they had here.

    Args:
        form: The form of the recurrence: not `directions_in_drive`, `beta_in_drive`, `dot` or `norm_epsilon`.
        weights: The matrices.
        vectors: The evaluated vectors.
        sources: The parameters that `vectors` was evaluated from.
    """

    def __init__(self, form: Form, weights: LayerWeights, vectors: LayerVectors, sources: list[Tensor]):
        size = vectors.real.shape[0]
        width = size if weights.input_weight is None else weights.input_weight.shape[1]
        self.dtype = next(iter(weights.tensors()), vectors.real).dtype
        library = _declare_functions(_build.load("adpt_layer", _SCALARS[self.dtype]))
        self._run, self._compare = library.adpt_layer_forward, library.adpt_layer_is_current
        self.state_size = size
        self.input_size = width
        self.output_size = size if weights.readout_weight is None else weights.readout_weight.shape[0]
        self._memory = [*weights.tensors(), *sources]
        # A tensor whose storage was replaced cannot get the same address again while these views are alive.
        self._views = [t.detach() for t in self._memory]
        self._addresses = [t.data_ptr() for t in self._memory]
        self._dtypes = [t.dtype for t in self._memory]
        directions, biases = _pointers(weights.directions), _pointers(weights.direction_biases)
        self._sources = sources
        source_addresses = _pointers(sources)
        source_bytes = (ctypes.c_int64 * len(sources))(*(t.nbytes for t in sources))
        self._arrays = directions, biases, source_addresses, source_bytes
        self._call = _mirror("Layer")(
            width=width,
            heads=form.heads,
            size=size // form.heads,
            output_width=self.output_size,
            complex_pairs=vectors.imag is not None,
            rotates=bool(weights.directions),
            source=int(form.source),
            retraction=int(form.retraction),
            rotation_aware=form.rotation_aware
            and form.retraction in (RetractionKind.EXPONENTIAL, RetractionKind.CAYLEY),
            gate_rank=0 if weights.gate is None else weights.gate.down.shape[0],
            spike_threshold=form.spike_threshold,
            input_weight=_address(weights.input_weight),
            input_bias=_address(weights.input_bias),
            **({} if weights.gate is None else {f"gate_{k}": t.data_ptr() for k, t in weights.gate._asdict().items()}),
            directions=ctypes.addressof(directions),
            direction_biases=ctypes.addressof(biases) if weights.direction_biases else None,
            readout_weight=_address(weights.readout_weight),
            readout_bias=_address(weights.readout_bias),
            source_count=len(sources),
            sources=ctypes.addressof(source_addresses),
            source_bytes=ctypes.addressof(source_bytes),
        )
        self._reference = ctypes.byref(self._call)
        self.set_vectors(vectors)
        workspace = _buffers.Block(library.adpt_layer_workspace(self._reference))
        self._call.workspace = workspace.address
        self._workspace = workspace
        self._scratch: tuple[int, int] = 0, 0
        self._drive = self._states = torch.empty(0, dtype=self.dtype, device="cpu")

    def set_vectors(self, vectors: LayerVectors) -> None:
        """Replace the evaluated vectors by those of the present values of the sources.

        Args:
            vectors: The evaluated vectors.
        """
        real, imag, gain_real, gain_imag, beta = (None if t is None else t.detach().contiguous() for t in vectors)
        kept = real, _negate_first_of_pairs(imag), gain_real, _negate_first_of_pairs(gain_imag), beta
        copies = b"".join(ctypes.string_at(t.data_ptr(), t.nbytes) for t in self._sources)
        self._kept = kept, copies  # keeps the memory alive
        call = self._call
        call.real, call.imag, call.gain_real, call.gain_imag, call.beta = map(_address, kept)
        call.source_copies = ctypes.cast(ctypes.c_char_p(copies), ctypes.c_void_p)

    def is_current(self) -> bool:
        """Return whether the sources have the values from which the vectors were evaluated."""
        return bool(self._compare(self._reference))

    def is_valid(self) -> bool:
        """Return whether all parameters are still at the addresses that a call reads."""
        memory = self._memory
        return (
            [t.data_ptr() for t in memory] == self._addresses
            and [t.dtype for t in memory] == self._dtypes
            and False not in [t.is_contiguous() for t in memory]
        )

    def run(self, x: Tensor, initial: Tensor | None, final: Tensor) -> Tensor | None:
        """Run the layer.

        Args:
            x: (batch, steps, width), contiguous; (batch, width) for one step.
            initial: The state before the first step, (batch, n), contiguous; None for zeros.
            final: Receives the state after the last step, (batch, n); may be `initial`.

        Returns:
            The outputs, shaped as `x` but for the last dimension; None if a source has changed, which means that
            `set_vectors` must be called first.
        """
        call = self._call
        shape = x.shape
        batch, steps = shape[0], shape[1] if len(shape) == 3 else 1
        if self._scratch != (batch, steps):
            self._scratch = call.batch, call.steps = batch, steps
            rows = batch * steps * self.state_size
            self._drive = torch.empty(rows, dtype=self.dtype, device="cpu")
            call.drive = self._drive.data_ptr()
            if call.readout_weight:
                self._states = torch.empty(rows, dtype=self.dtype, device="cpu")
                call.states = self._states.data_ptr()
        outputs = torch.empty((*shape[:-1], self.output_size), dtype=self.dtype, device="cpu")
        call.x = x.data_ptr()
        call.initial = None if initial is None else initial.data_ptr()
        call.final = final.data_ptr()
        call.outputs = outputs.data_ptr()
        if not call.readout_weight:
            call.states = call.outputs
        return outputs if self._run(self._reference) else None


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _pointers(tensors: Any) -> Any:
    return (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))


def _negate_first_of_pairs(imag: Tensor | None) -> Tensor | None:
    """Return `imag` as the kernel multiplies it with swapped pairs: negated in the first entry of each pair."""
    return None if imag is None else torch.stack((-imag[::2], imag[1::2]), -1).flatten()


def compute_drive_gradients(
    to_drive: Tensor, x: Tensor, gain: Tensor, weights: LayerWeights, values: GateValues | None, *, needs_x: bool
) -> DriveGradients:
    """Return the gradients of the drive gain softplus(a) u, or gain u without an input gate.

    Args:
        to_drive: The gradient of the drive, (batch, steps, n).
        x: The inputs, (batch, steps, width).
        gain: The gain, (n,).
        weights: The matrices.
        values: The values of the gate in the forward pass.
        needs_x: Whether to compute the gradient of the inputs.

    Raises:
        InputError: A saved tensor has another shape, dtype or device than in the forward.
    """
    batch, steps, width = x.shape
    weight, bias, gate = weights.input_weight, weights.input_bias, weights.gate
    rows, size, rank = batch * steps, gain.shape[0], 0 if gate is None else gate.down.shape[0]
    if values is None or gate is None:
        of_gate: tuple[Any, ...] = (None,) * 5
        shapes: list[tuple[int, ...]] = []
    else:
        of_gate = *values, gate.down, gate.up
        shapes = [(rows, size), (rows, rank), (rows, size), (rank, size), (size, rank)]
    tensors = [
        t if t is None or t.is_contiguous() else t.contiguous() for t in (to_drive, x, gain, weight, bias, *of_gate)
    ]
    dtype, present = to_drive.dtype, [t for t in tensors if t is not None]
    shapes = [
        (batch, steps, size),
        (batch, steps, width),
        (size,),
        *[(size, width)] * (weight is not None),
        *[(size,)] * (bias is not None),
        *shapes,
    ]
    if [t.shape for t in present] != shapes or False in [t.dtype is dtype and t.is_cpu for t in present]:
        raise InputError(
            "adpt_layer: saved tensors changed their shape, dtype or device before the backward. "
            "Check the saved-tensor hooks."
        )
    results = DriveGradients(
        x=torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None,
        gain=torch.empty_like(gain),
        weight=None if weight is None else torch.empty_like(weight),
        bias=None if bias is None else torch.empty_like(bias),
        gate=() if gate is None else tuple(map(torch.empty_like, gate)),
    )
    library = _declare_functions(_build.load("adpt_layer", _SCALARS[dtype]))
    pointers = map(_address, (*tensors, *results[:4], *(results.gate or (None, None, None))))
    call = _mirror("DriveGradients")(rows, width, size, rank, *pointers)
    reference = ctypes.byref(call)
    workspace = _buffers.acquire(library.adpt_layer_drive_workspace(reference))
    call.workspace = workspace.address
    library.adpt_layer_drive_backward(reference)
    _buffers.release(workspace)
    return results


@functools.cache
def _declare_functions(library: Any) -> Any:
    forward = library.adpt_layer_workspace, library.adpt_layer_forward, library.adpt_layer_is_current
    backward = library.adpt_layer_drive_workspace, library.adpt_layer_drive_backward
    for mirror, layout, functions in (
        (_mirror("Layer"), library.adpt_layer_layout, forward),
        (_mirror("DriveGradients"), library.adpt_layer_drive_layout, backward),
    ):
        layout.restype = ctypes.c_int64
        assert layout() == ctypes.sizeof(mirror)
        for function in functions:
            function.argtypes, function.restype = [ctypes.POINTER(mirror)], ctypes.c_int64
    library.adpt_layer_drive_backward.restype = None
    return library
