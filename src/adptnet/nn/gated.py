"""A gated layer: a short convolution and a recurrent layer, multiplied by a gate of the input."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._typing import Device, DType
from .._validate import check_lengths, check_reset, make_validity_mask
from ..cells.base import register_state, select_rows
from ..errors import InputError, SpecError
from ..ops._fx import Proxy, record_call
from ..optim import NoDecay
from ..spec import check_kind, check_size, reset_from_spec, spec
from .adpt_layer import LayerSpec
from .bidirectional import check_batch_first
from .convolution import ShortConvolution
from .given import find_spec
from .mixer import MixerSpec, Steps
from .packing import check_padded, run_ragged
from .streaming import Streamable

__all__ = ["Gated", "GatedSpec", "GatedState"]


@spec
class GatedSpec(MixerSpec):
    """A recurrent layer between two linear maps, with a short convolution before it and a gate after it.

    Attributes:
        layer: The recurrent layer. Its width, usually one or two times `width`, is the width inside.
        width: Features in and out.
        taps: Kernel length of the causal convolution before the layer; 0 for no convolution.
    """

    layer: LayerSpec
    width: int
    taps: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer", find_spec(self.layer))
        check_kind(self, LayerSpec, "ADPTNet(128).spec", layer=self.layer)
        check_batch_first(self, self.layer)
        check_size(self, width=self.width)
        if isinstance(self.taps, bool) or not isinstance(self.taps, int) or self.taps < 0:
            raise SpecError(f"GatedSpec(taps={self.taps!r}): must be an integer >= 0; 0 is no convolution.")

    def build(self, *, device: Device = None, dtype: DType = None) -> "Gated":
        return Gated(self, device=device, dtype=dtype)


@register_state
class GatedState(NamedTuple):
    """State of a gated layer: that of its recurrent layer, and the last inputs of its convolution."""

    layer: Any  # the state of the recurrent layer
    recent: Tensor  # (batch, taps - 1, inner width), zero before the sequence began; no steps without taps

    def detach(self) -> "GatedState":
        """Return the state detached from the autograd graph, for truncated backpropagation."""
        return GatedState(self.layer.detach(), self.recent.detach())

    def to(self, *target: Any, **options: Any) -> "GatedState":
        """Return the state moved or cast; arguments as for `ADPTState.to`."""
        return GatedState(self.layer.to(*target, **options), self.recent.to(*target, **options))

    def select(self, rows: Any) -> "GatedState":
        """Return the state of the sequences `rows`; see `ADPTState.select`.

        Args:
            rows: Indices or a mask over the batch.
        """
        return GatedState(self.layer.select(rows), select_rows(self.recent, rows))


class Gated(Streamable):
    """The layer W_o((s + D ⊙ u) ⊙ SiLU(W_g z)), u = SiLU(conv(W_i z)), s = layer(u): (batch, time, width) in and out.

    The recurrence is that of `layer` on the inputs u. Bounds and certificates of a recurrence hold for all inputs, so
    they are those of the layer alone.

    Args:
        spec: The description of the layer.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(self, spec: GatedSpec, *, device: Device = None, dtype: DType = None):
        super().__init__()
        self.spec = spec
        self.width = spec.width
        inner = spec.layer.width
        self.enter = nn.Linear(spec.width, 2 * inner, bias=False, device=device, dtype=dtype)
        self.convolution: ShortConvolution | None = None
        if spec.taps:
            self.convolution = ShortConvolution(inner, spec.taps, bias=True, device=device, dtype=dtype)
        self.layer = spec.layer.build(device=device, dtype=dtype)
        self.skip = _Skip(inner, device, dtype)
        self.leave = nn.Linear(inner, spec.width, bias=False, device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        state: GatedState | None = None,
        *,
        lengths: Tensor | None = None,
        reset: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **run: Any,
    ) -> tuple[Tensor, GatedState]:
        """Run the layer along a sequence.

        Args:
            x: (batch, time, width).
            state: The state that an earlier call returned.
            lengths: (batch,) true lengths of right-padded sequences. Outputs past the end are zero.
            reset: (batch, time) bool, True where a new sequence begins; the convolution does not reach beyond it.
            cu_seqlens: (sequences + 1,) cumulative lengths of sequences concatenated in one row.
            run: Further keyword arguments of `RecurrentLayer.forward`: `solver`, `adjoint`, `dt`, `beta`.

        Returns:
            Outputs (batch, time, width) and the state after the last step.
        """
        if isinstance(x, Proxy):
            return record_call(self, x, state, run, lengths=lengths, reset=reset, cu_seqlens=cu_seqlens)
        check_padded(x)
        if x.dim() != 3 or x.shape[-1] != self.width:
            raise InputError(f"a gated layer takes (batch, time, {self.width}); got shape {tuple(x.shape)}.")
        if cu_seqlens is None:
            return self._run(x, state, lengths, reset, run)
        for name, value in {"lengths": lengths, "reset": reset, "dt": run.get("dt")}.items():
            if value is not None:
                raise InputError(f"{name}= needs padded sequences, and cu_seqlens= is for concatenated ones. Drop one.")
        outputs, after = run_ragged(x, cu_seqlens, lambda y, n: self._run(y, state, n, None, run))
        return outputs, after

    def step(self, x: Tensor, state: GatedState | None = None) -> tuple[Tensor, GatedState]:
        """Run one step, with the same result as `forward`. The cost does not depend on the position.

        Args:
            x: (batch, width).
            state: The state that an earlier call returned.
        """
        if x.dim() != 2 or x.shape[-1] != self.width:
            raise InputError(
                f"step takes one time step, (batch, {self.width}); got {tuple(x.shape)}. "
                "For a whole sequence call the layer itself."
            )
        before = _check_state(state, x.shape[0])
        values, gate = self.enter(x).chunk(2, -1)
        u, recent = self._convolve(values.unsqueeze(1), before[1], None, None)
        mixed, after = self.layer.step(u.squeeze(1), before[0])
        return self._leave(mixed, u.squeeze(1), gate), GatedState(after, recent)

    def initial_state(self, batch: int, *, device: Device = None, dtype: DType = None) -> GatedState:
        """Return the state before the first step.

        Args:
            batch: Number of sequences.
            device: Device of the state; that of the parameters by default.
            dtype: Dtype of the state; that of the recurrence by default.
        """
        state = self.layer.initial_state(batch, device=device, dtype=dtype)
        recent = (batch, max(0, self.spec.taps - 1), self.spec.layer.width)
        weight = self.enter.weight
        return GatedState(state, torch.zeros(recent, device=device or weight.device, dtype=dtype or weight.dtype))

    def reset_parameters(self) -> None:
        """Reinitialize all parameters in place, as the constructor does."""
        reset_from_spec(self, self.spec)

    def _run(
        self, x: Tensor, state: GatedState | None, lengths: Tensor | None, reset: Tensor | None, run: dict[str, Any]
    ) -> tuple[Tensor, GatedState]:
        batch, count = x.shape[:2]
        lengths = check_lengths(lengths, batch, count, x.device)
        reset = check_reset(reset, batch, count)
        inside = None if lengths is None else make_validity_mask(lengths, count).unsqueeze(-1)
        x = x if inside is None else torch.where(inside, x, 0.0)
        before = _check_state(state, batch)
        values, gate = self.enter(x).chunk(2, -1)
        u, recent = self._convolve(values, before[1], lengths, reset)
        mixed, after = self.layer(u, before[0], lengths=lengths, reset=reset, **run)
        y = self._leave(mixed, u, gate)
        return y if inside is None else torch.where(inside, y, 0.0), GatedState(after, recent)

    def _convolve(
        self, values: Tensor, recent: Tensor | None, lengths: Tensor | None, reset: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the inputs of the layer and the last inputs of the convolution."""
        batch, count, inner = values.shape
        if recent is None:
            recent = values.new_zeros(batch, max(0, self.spec.taps - 1), inner)
        if self.convolution is not None and count:
            position = torch.zeros(batch, count, dtype=torch.int64, device=values.device)  # the convolution needs none
            values, recent = self.convolution(values, recent.to(values.dtype), Steps(position, reset, lengths, None))
        return functional.silu(values), recent

    def _leave(self, mixed: Tensor, u: Tensor, gate: Tensor) -> Tensor:
        y: Tensor = self.leave((mixed.to(u.dtype) + self.skip.weight * u) * functional.silu(gate))
        return y


class _Skip(NoDecay):
    """The vector D of the skip connection around the recurrence, initialized at 1."""

    def __init__(self, size: int, device: Device, dtype: DType):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))


def _check_state(state: Any, batch: int) -> tuple[Any, Tensor | None]:
    if state is None:
        return None, None
    is_pair = isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], Tensor)
    if not is_pair or state[1].shape[0] != batch:
        raise InputError(f"state must be the GatedState an earlier call returned for {batch} sequences.")
    return state[0], state[1]
