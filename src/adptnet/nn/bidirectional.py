"""A bidirectional layer: one layer for each direction of time."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._typing import Device, DType
from .._validate import check_lengths
from ..cells import ADPTState
from ..cells.base import register_state
from ..errors import InputError, SpecError
from ..ops._fx import Proxy, record_call
from ..ops._torch_state import without_autocast
from ..recurrence.projections import Dense
from ..recurrence.projections.base import apply_map
from ..spec import ModuleSpec, check_kind, reset_from_spec, spec
from .adpt_layer import LayerSpec
from .given import find_spec, make_layer, place
from .mixer import MixerSpec
from .packing import check_padded

__all__ = ["Bidirectional", "BidirectionalSpec", "BidirectionalState"]


@spec
class BidirectionalSpec(ModuleSpec):
    """Two layers with the same spec, one for each direction of time, and a dense map that merges their outputs.

    Attributes:
        layer: The spec of both layers; a layer is replaced by its spec.
    """

    layer: LayerSpec

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer", find_spec(self.layer))
        check_kind(self, LayerSpec, "layer.spec", layer=self.layer)
        check_batch_first(self, self.layer)

    @property
    def width(self) -> int:
        return self.layer.width

    def build(self, *, device: Device = None, dtype: DType = None) -> "Bidirectional":
        return Bidirectional(self.layer, device=device, dtype=dtype)


@register_state
class BidirectionalState(NamedTuple):
    """States of the forward layer (`ahead`) and of the backward layer (`back`)."""

    ahead: ADPTState
    back: ADPTState

    def detach(self) -> "BidirectionalState":
        """Return the states detached from the autograd graph."""
        return BidirectionalState(self.ahead.detach(), self.back.detach())

    def to(self, *target: Any, **options: Any) -> "BidirectionalState":
        """Return the states moved or cast; arguments as for `ADPTState.to`."""
        return BidirectionalState(self.ahead.to(*target, **options), self.back.to(*target, **options))

    def select(self, rows: Any) -> "BidirectionalState":
        """Return the states of the sequences `rows`; see `ADPTState.select`.

        Args:
            rows: Indices or a mask over the batch.
        """
        return BidirectionalState(self.ahead.select(rows), self.back.select(rows))


class Bidirectional(nn.Module):
    """A layer that runs forward in time and another that runs backward: (batch, time, width) in and out.

    A dense map merges the concatenated outputs into `width` features. `nn.GRU(bidirectional=True)` instead returns the
    concatenation, which is twice as wide.

    Args:
        layer: The spec of both layers; or a layer, whose weights are copied into both.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(self, layer: LayerSpec | nn.Module, *, device: Device = None, dtype: DType = None):
        super().__init__()
        layer = make_layer(layer)
        self.spec = BidirectionalSpec(layer)  # type: ignore[arg-type]  # replaced by its spec
        self.width = self.spec.width
        self.ahead, self.back = (place(layer, self.spec.layer, device, dtype) for _ in range(2))
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
        """Run both layers along a sequence.

        Args:
            x: (batch, time, width).
            state: The state that an earlier call returned.
            lengths: (batch,) true lengths of right-padded sequences.
            reset: (batch, time) bool, True where a new sequence begins.
            run: Further keyword arguments of `RecurrentLayer.forward`, except `cu_seqlens`.

        Returns:
            Outputs (batch, time, width) and the states of both layers, after the last step for the forward layer, after
            the first step for the backward layer.
        """
        if isinstance(x, Proxy):
            return record_call(self, x, state, run, lengths=lengths, reset=reset)
        check_padded(x)
        if run.get("cu_seqlens") is not None:
            raise InputError("a bidirectional layer takes padded sequences. Pass lengths= instead of cu_seqlens=.")
        if x.dim() != 3:
            raise InputError(f"a bidirectional layer takes (batch, time, {self.width}); got {tuple(x.shape)}.")
        state_ahead, state_back = (None, None) if state is None else state
        ahead, final_ahead = self.ahead(x, state_ahead, lengths=lengths, reset=reset, **run)
        flip = Flip(x, lengths)
        back_reset = None if reset is None else flip(_ends(torch.as_tensor(reset)) & flip.inside)
        back_run = run if run.get("dt") is None else {**run, "dt": flip(torch.as_tensor(run["dt"], device=x.device))}
        back, final_back = self.back(flip(x), state_back, lengths=lengths, reset=back_reset, **back_run)
        with without_autocast(x.device):
            both = torch.cat((ahead, flip(back)), -1)
            own = next(self.merge.parameters(), both).dtype  # the merge runs in the dtype of its weights
            merged = apply_map(self.merge, both.to(own)).to(x.dtype)
        return merged, BidirectionalState(final_ahead, final_back)

    def reset_parameters(self) -> None:
        """Reinitialize all parameters in place, as the constructor does."""
        reset_from_spec(self, self.spec)

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Raise `InputError`: a bidirectional layer needs the whole sequence.

        Args:
            x: Not used.
            state: Not used.

        Raises:
            InputError: Always.
        """
        raise InputError("a bidirectional layer needs the whole sequence and has no step. Call the layer itself.")


def check_batch_first(owner: ModuleSpec, layer: LayerSpec) -> None:
    """Raise `SpecError` if `layer`, which `owner` contains, takes (time, batch, width).

    Args:
        owner: The spec that contains `layer`, for the message.
        layer: The spec of a layer.
    """
    if not layer.batch_first:
        raise SpecError(
            f"{type(owner).__name__} is batch first, and so must its layer be. Build the layer with batch_first=True."
        )


def check_layer(owner: ModuleSpec, layer: object) -> None:
    """Replace a layer in a spec by its own spec. Raise `SpecError` if it is not a layer that is batch first.

    Args:
        owner: The spec, whose field `layer` is set.
        layer: The value to check.
    """
    layer = find_spec(layer)
    if not isinstance(layer, (LayerSpec, BidirectionalSpec, MixerSpec)):
        raise SpecError(
            f"{type(owner).__name__}(layer={type(layer).__name__}): must be a LayerSpec, BidirectionalSpec or "
            "MixerSpec, or a layer. Pass e.g. ADPTNet(64)."
        )
    object.__setattr__(owner, "layer", layer)
    if isinstance(layer, LayerSpec):
        check_batch_first(owner, layer)


def _ends(reset: Tensor) -> Tensor:
    """Return a mask that is True where the next step is a reset: in reversed time a sequence begins there."""
    return torch.cat((reset[:, 1:], torch.zeros_like(reset[:, :1])), 1)


class Flip:
    """Reverses each sequence in time; padding stays at the end."""

    def __init__(self, x: Tensor, lengths: Tensor | None):
        batch, steps = x.shape[:2]
        index = torch.arange(steps, device=x.device).expand(batch, steps)
        lengths = check_lengths(lengths, batch, steps, x.device)
        ends = torch.full_like(index[:, :1], steps) if lengths is None else lengths.unsqueeze(-1)
        self.inside = index < ends - 1  # whether the next step belongs to the same sequence
        self.index = torch.where(index < ends, ends - 1 - index, index)

    def __call__(self, values: Tensor) -> Tensor:
        index = self.index if values.dim() == 2 else self.index.unsqueeze(-1).expand_as(values)
        return values.gather(1, index)
