"""A layer read in both directions of time."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._typing import Device, DType
from ..cells import ADPTState
from ..cells.base import register_state
from ..errors import InputError, SpecError
from ..ops._fx import Proxy, record_call
from ..ops._torch_state import without_autocast
from ..recurrence.projections import Dense
from ..recurrence.projections.base import apply_map
from ..solvers.problem import check_lengths
from ..spec import ModuleSpec, check_kind, reset_from_spec, spec
from .layer import LayerSpec
from .packing import check_padded

__all__ = ["Bidirectional", "BidirectionalSpec", "BidirectionalState"]


@spec
class BidirectionalSpec(ModuleSpec):
    """Two layers of one kind, one for each direction of time, and a dense map from both outputs to one."""

    layer: LayerSpec

    def __post_init__(self) -> None:
        check_kind(self, LayerSpec, "layer.spec", layer=self.layer)
        refuse_time_major(self, self.layer)

    @property
    def width(self) -> int:
        return self.layer.width

    def build(self, *, device: Device = None, dtype: DType = None) -> "Bidirectional":
        return Bidirectional(self.layer, device=device, dtype=dtype)


@register_state
class BidirectionalState(NamedTuple):
    """The states of both layers."""

    ahead: ADPTState
    back: ADPTState

    def detach(self) -> "BidirectionalState":
        """As `ADPTState.detach`."""
        return BidirectionalState(self.ahead.detach(), self.back.detach())

    def to(self, *target: Any, **options: Any) -> "BidirectionalState":
        """As `ADPTState.to`."""
        return BidirectionalState(self.ahead.to(*target, **options), self.back.to(*target, **options))

    def select(self, rows: Any) -> "BidirectionalState":
        """As `ADPTState.select`."""
        return BidirectionalState(self.ahead.select(rows), self.back.select(rows))


class Bidirectional(nn.Module):
    """Runs a layer forward and another one backward in time: (batch, time, width) in and out.

    A dense map takes both outputs, side by side, to one of `width` features. `nn.GRU(bidirectional=True)` returns them
    side by side, twice as wide.

    Args:
        layer: What each direction is: `layer.spec`.
    """

    def __init__(self, layer: LayerSpec, *, device: Device = None, dtype: DType = None):
        super().__init__()
        self.spec = BidirectionalSpec(layer)
        self.width = layer.width
        self.ahead = layer.build(device=device, dtype=dtype)
        self.back = layer.build(device=device, dtype=dtype)
        self.merge = Dense().build(2 * self.width, self.width, device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        state: BidirectionalState | None = None,
        *,
        lengths: Tensor | None = None,
        reset: Tensor | None = None,
        **run: Any,
    ) -> tuple[Tensor, BidirectionalState]:
        """As `RecurrentLayer.forward`, on (batch, time, width). The backward state is the one at the first step."""
        if isinstance(x, Proxy):
            return record_call(self, x, state, run, lengths=lengths, reset=reset)
        check_padded(x)
        if run.get("cu_seqlens") is not None:
            raise InputError("a bidirectional layer takes padded sequences. Pass lengths= instead of cu_seqlens=.")
        if x.dim() != 3:
            raise InputError(f"a bidirectional layer takes (batch, time, {self.width}); got {tuple(x.shape)}.")
        state_ahead, state_back = (None, None) if state is None else state
        ahead, final_ahead = self.ahead(x, state_ahead, lengths=lengths, reset=reset, **run)
        flip = _Flip(x, lengths)
        back_reset = None if reset is None else flip(_ends(torch.as_tensor(reset)) & flip.inside)
        back_run = run if run.get("dt") is None else {**run, "dt": flip(torch.as_tensor(run["dt"], device=x.device))}
        back, final_back = self.back(flip(x), state_back, lengths=lengths, reset=back_reset, **back_run)
        with without_autocast(x.device):
            both = torch.cat((ahead, flip(back)), -1)
            own = next(self.merge.parameters(), both).dtype  # the merge runs in the dtype of its weights
            merged = apply_map(self.merge, both.to(own)).to(x.dtype)
        return merged, BidirectionalState(final_ahead, final_back)

    def reset_parameters(self) -> None:
        """Draw all parameters again, in place, as the constructor does."""
        reset_from_spec(self, self.spec)

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        raise InputError("a bidirectional layer needs the whole sequence and has no step. Call the layer itself.")


def refuse_time_major(owner: ModuleSpec, layer: LayerSpec) -> None:
    """What is built around a layer is batch first."""
    if not layer.batch_first:
        raise SpecError(
            f"{type(owner).__name__} is batch first, and so must its layer be. Build the layer with batch_first=True."
        )


def _ends(reset: Tensor) -> Tensor:
    """True where the next step is a reset: read backward, a sequence begins there."""
    return torch.cat((reset[:, 1:], torch.zeros_like(reset[:, :1])), 1)


class _Flip:
    """Turns each sequence around in place; padding stays at the end."""

    def __init__(self, x: Tensor, lengths: Tensor | None):
        batch, steps = x.shape[:2]
        index = torch.arange(steps, device=x.device).expand(batch, steps)
        lengths = check_lengths(lengths, batch, steps, x.device)
        ends = torch.full_like(index[:, :1], steps) if lengths is None else lengths.unsqueeze(-1)
        self.inside = index < ends - 1  # whether the next step belongs to the sequence
        self.index = torch.where(index < ends, ends - 1 - index, index)

    def __call__(self, values: Tensor) -> Tensor:
        index = self.index if values.dim() == 2 else self.index.unsqueeze(-1).expand_as(values)
        return values.gather(1, index)
