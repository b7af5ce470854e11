"""Directions: how the key and the value, which span the plane of rotation, are computed."""

import abc
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._typing import Device, DType, Vector
from ..errors import InputError, SpecError
from ..ops._unit_vectors import fix_dot_product, spike, unit
from ..optim import DirectionOnly
from ..spec import Spec, check_nonnegative, check_positive, check_size, spec
from .projections import Projection, ProjectionSpec
from .projections.base import Biased, apply_map, bind_map, is_hooked
from .projections.heads import Heads

__all__ = [
    "LAYER_NORM_EPS",
    "DirectionMatrices",
    "DirectionSpec",
    "Directions",
    "FromInput",
    "FromState",
    "FromWholeState",
    "KeyValue",
    "apply_source",
    "bind_directions",
    "spike",
    "unit",
]

LAYER_NORM_EPS = 1e-5  # the default of nn.LayerNorm


class KeyValue(NamedTuple):
    """The key and value that span the plane of a rotation: (*b, n), or (*b, heads, n / heads)."""

    key: Tensor
    value: Tensor


class DirectionMatrices(NamedTuple):
    """K and V of all heads as matrices. A call returns key and value, as a function of `Directions.bind` does."""

    source: Callable[[Tensor], Tensor]  # from the state to the vector that K and V are applied to
    weight: Tensor  # (heads, 2, m, m), m = n / heads; (heads, 2, m, n) if they act on the whole state
    bias: Tensor | None = None  # (heads, 2, m)
    norm_weight: Tensor | None = None  # (2, n): of the LayerNorm on key and value
    norm_bias: Tensor | None = None
    norm_epsilon: float = LAYER_NORM_EPS
    dot: float | None = None
    softness: float = 0.0  # see `FromWholeState`

    def __call__(self, x: Tensor) -> KeyValue:
        heads = len(self.weight)
        source = self.source(x)
        if self.weight.shape[-1] > self.weight.shape[-2]:
            projected = torch.einsum("...i,hpji->p...hj", source, self.weight)
        else:
            projected = torch.einsum("...hi,hpji->p...hj", source.unflatten(-1, (heads, -1)), self.weight)
        parts = list(projected if self.bias is None else map(torch.add, projected, self.bias.unbind(1)))
        vectors = [part.flatten(-2) for part in parts]
        if self.norm_weight is not None and self.norm_bias is not None:
            vectors = [
                functional.layer_norm(unit(vector), vector.shape[-1:], weight, bias, self.norm_epsilon)
                for vector, weight, bias in zip(vectors, self.norm_weight, self.norm_bias, strict=True)
            ]
        if self.softness:
            length = self.softness * _length(x)
            return KeyValue(*(_soften(vector, length, heads) for vector in vectors))
        key, value = (_normalize(vector, heads) for vector in vectors)
        return _span_plane(key, value, self.dot)


class DirectionSpec(Spec, abc.ABC):
    """Base class of the specs of the directions.

    Attributes:
        layer_norm: Apply a LayerNorm to Kx and Vx before they are normalised to unit length.
        dot: Fix key·value at this number (eq:parametric_kv_dot, with the mixing weight √(1 - p²) that keeps the key
            at unit length): 0 rotates furthest, ±1 not at all. None leaves it free.
        heads: Divide the state into equal parts, each with its own K, V and plane.
    """

    layer_norm: bool
    dot: float | None
    heads: int
    sees_whole_state: ClassVar[bool] = False  # whether K and V of a head act on the states of all heads

    def __post_init__(self) -> None:
        check_size(self, heads=self.heads)
        number = isinstance(self.dot, (int, float)) and not isinstance(self.dot, bool)
        if self.dot is not None and not (number and -1 <= self.dot <= 1):
            raise SpecError(f"{type(self).__name__}(dot={self.dot!r}): a dot product of unit vectors is in [-1, 1].")

    @property
    def keeps_lemmas(self) -> bool:
        """True if the paper's lemmas (bounds on Jacobians) hold with these directions (deviations.md, point 13)."""
        return not self.layer_norm and self.dot is None

    def build(
        self, state_size: int, projection: ProjectionSpec, *, device: Device = None, dtype: DType = None
    ) -> "Directions":
        """Build K and V.

        Args:
            state_size: State dimension n.
            projection: The spec of K and of V.
            device: Device of the parameters.
            dtype: Dtype of the parameters.
        """
        return Directions(self, state_size, projection, device, dtype)

    def projected_size(self, state_size: int) -> int:
        """Return the size of the square matrices K and V, each of which is for one head unless it sees the whole state.

        Args:
            state_size: State dimension n.
        """
        return state_size if self.sees_whole_state else state_size // self.heads

    def source(self, x: Tensor) -> Tensor:
        """Return the vector that K and V are applied to: `x`, its ReLU or its spikes.

        Args:
            x: The state, or the projected input, (*b, n).
        """
        return x


@spec
class FromState(DirectionSpec):
    """Key and value are unit vectors along K x and V x (eq:details_skew_kv).

    Attributes:
        relu: Apply K and V to ReLU(x), which improves state tracking. The step is then only positively homogeneous,
            and the bounds of `analysis.certificate` do not hold (the paper says otherwise, see deviations.md). At a
            state with no positive entry the rotation is the identity and the step is discontinuous.
        spike: Apply K and V to the spikes [x >= spike], with a boxcar surrogate derivative of width one.
        layer_norm, dot, heads: See `DirectionSpec`.
    """

    relu: bool = False
    spike: float | None = None
    layer_norm: bool = False
    dot: float | None = None
    heads: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spike is not None:
            check_positive(self, spike=self.spike)
            if self.relu:
                raise SpecError(f"{self}: K and V act on either ReLU(x) or spikes. Drop relu=True, or spike=.")

    @property
    def is_entrywise(self) -> bool:
        """True if K and V act on an elementwise function of the state, which depends on the basis of the state."""
        return self.relu or self.spike is not None

    @property
    def keeps_lemmas(self) -> bool:
        return super().keeps_lemmas and not self.is_entrywise

    def source(self, x: Tensor) -> Tensor:
        return apply_source(x, self.relu, self.spike)


@spec
class FromWholeState(DirectionSpec):
    """Key and value of every head are directions along K_h x and V_h x of the whole state x: a plane for each head.

    K and V are n-by-n, as for one head, and K_h is the rows of K that belong to head h. With several heads K_h has a
    null space, near which the key rotates arbitrarily fast, so that no bound on the Jacobian holds. A positive softness
    ε restores one (bounds.md, section 3): the key is K_h x / √(‖K_h x‖² + ε²‖x‖²), shorter than one.

    Attributes:
        heads: See `DirectionSpec`; state dimensions of about 8 per head work best.
        softness: ε; 0 for unit vectors.
    """

    sees_whole_state: ClassVar[bool] = True
    heads: int = 1
    softness: float = 0.0
    layer_norm: ClassVar[bool] = False  # type: ignore[misc]
    dot: ClassVar[float | None] = None  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_nonnegative(self, softness=self.softness)

    @property
    def keeps_lemmas(self) -> bool:
        return self.heads == 1 or self.softness > 0


@spec
class FromInput(DirectionSpec):
    """Key and value are unit vectors along K u and V u of the projected input u = B o (eq:linear_ADPTNet).

    M then varies with the input but not with the state: the layer is linear in its state.

    Attributes:
        layer_norm, dot, heads: See `DirectionSpec`.
    """

    layer_norm: bool = False
    dot: float | None = None
    heads: int = 1

    @property
    def keeps_lemmas(self) -> bool:
        return True  # nothing depends on the state, so J = M


def apply_source(x: Tensor, relu: bool, threshold: float | None) -> Tensor:
    """Return the vector that K and V are applied to: the state, its ReLU or its spikes.

    Args:
        x: The state, (*b, n).
        relu: Whether it is the ReLU.
        threshold: It is the spikes [x >= threshold] if this is not None.
    """
    if threshold is not None:
        return spike(x - threshold)
    return x.relu() if relu else x


class Directions(DirectionOnly):
    """K and V, with the functions around them: ReLU or spikes, LayerNorm, normalisation, fixed dot product.

    Args:
        spec: The spec of the directions.
        state_size: State dimension n.
        projection: The spec of K and of V.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(self, spec: DirectionSpec, state_size: int, projection: ProjectionSpec, device: Device, dtype: DType):
        super().__init__()
        self.spec = spec

        def projections() -> Projection:
            size = spec.projected_size(state_size)
            heads = [projection.build(size, size, device=device, dtype=dtype) for _ in range(state_size // size)]
            return heads[0] if len(heads) == 1 else Heads(heads)

        def norm() -> nn.LayerNorm | None:
            return nn.LayerNorm(state_size, LAYER_NORM_EPS, device=device, dtype=dtype) if spec.layer_norm else None

        self.key_projection, self.value_projection = projections(), projections()
        self.key_norm, self.value_norm = norm(), norm()

    def is_stock(self) -> bool:
        """Return whether K, V and the norms are unmodified modules of the package without hooks.

        Only then may a kernel evaluate them without calling the modules.
        """
        projections, norms = (self.key_projection, self.value_projection), (self.key_norm, self.value_norm)
        return (
            type(self) is Directions
            and not is_hooked(self)
            and all(isinstance(p, Projection) and p.is_stock() for p in projections)
            and (norms == (None, None) or all(_is_stock_norm(norm) for norm in norms))
        )

    def bind(self, dtype: torch.dtype) -> Callable[[Tensor], KeyValue]:
        """Return a function from a state to its key and value, with the projections evaluated once.

        Args:
            dtype: The dtype of the states.
        """
        if isinstance(self.spec, FromWholeState) and self.spec.softness:
            project_key, project_value = (
                _bind_square(part, dtype) for part in (self.key_projection, self.value_projection)
            )
            return _make_soft_directions(project_key, project_value, self.spec)
        key_of = _make_direction(_bind_square(self.key_projection, dtype), self.key_norm, self.spec.heads)
        value_of = _make_direction(_bind_square(self.value_projection, dtype), self.value_norm, self.spec.heads)

        def directions(x: Tensor) -> KeyValue:
            source = self.spec.source(x)
            return _span_plane(key_of(source), value_of(source), self.spec.dot)

        return directions

    def stack(self, dtype: torch.dtype) -> DirectionMatrices:
        """Return K and V as matrices, for a kernel. Factored projections become dense.

        Args:
            dtype: The dtype of the states.
        """
        stacked = [_stack_heads(p, dtype) for p in (self.key_projection, self.value_projection)]
        biases = [bias for _, bias in stacked if bias is not None]
        norm_weight = norm_bias = None
        if self.key_norm is not None and self.value_norm is not None:
            norms = (self.key_norm, self.value_norm)
            norm_weight, norm_bias = (
                torch.stack([getattr(norm, name) for norm in norms]).to(dtype) for name in ("weight", "bias")
            )
        weight = torch.stack([matrices for matrices, _ in stacked], 1)
        bias = torch.stack(biases, 1) if biases else None
        softness = 0.0
        if isinstance(self.spec, FromWholeState):  # K and V of each head are rows of one matrix
            softness, rows = self.spec.softness, (self.spec.heads, -1)
            weight = weight[0].unflatten(1, rows).transpose(0, 1)
            bias = None if bias is None else bias[0].unflatten(1, rows).transpose(0, 1)
        return DirectionMatrices(
            self.spec.source, weight, bias, norm_weight, norm_bias, dot=self.spec.dot, softness=softness
        )

    def forward(self, x: Vector) -> KeyValue:
        """Return the key and value of a state.

        Args:
            x: (*b, n).
        """
        return self.bind(x.dtype)(x)


def bind_directions(module: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], KeyValue]:
    """Return a function from a state to its key and value.

    Args:
        module: `Directions`, whose projections are evaluated once; a module with hooks, or of another class, is called
            every time.
        dtype: The dtype of the states.
    """
    if isinstance(module, Directions) and not is_hooked(module):
        return module.bind(dtype)
    return lambda x: KeyValue(*module(x))


def _is_stock_norm(norm: nn.Module | None) -> bool:
    return type(norm) is nn.LayerNorm and norm.eps == LAYER_NORM_EPS and norm.bias is not None and not is_hooked(norm)


def _bind_square(projection: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return the map of K or V. A user's module in their place is checked to preserve the size of its input."""
    project = bind_map(projection, dtype)
    if isinstance(projection, Projection):
        return project

    def project_checked(x: Tensor) -> Tensor:
        y = project(x)
        if y.shape != x.shape:
            raise InputError(
                f"{type(projection).__name__}, used as K or V, returned shape {tuple(y.shape)} for {tuple(x.shape)}; "
                f"key and value are as large as the state. Pass a module from {x.shape[-1]} to {x.shape[-1]} features."
            )
        return y

    return project_checked


def _make_direction(
    project: Callable[[Tensor], Tensor], norm: nn.Module | None, heads: int
) -> Callable[[Tensor], Tensor]:
    """Return the function from a source vector to a unit vector per head: project, normalise, LayerNorm, normalise."""

    def direction(x: Tensor) -> Tensor:
        y = project(x)
        if isinstance(norm, nn.LayerNorm) and _is_stock_norm(norm):
            y = functional.layer_norm(
                unit(y), norm.normalized_shape, norm.weight.to(y.dtype), norm.bias.to(y.dtype), norm.eps
            )
        elif norm is not None:
            y = apply_map(norm, unit(y))
        return _normalize(y, heads)

    return direction


def _make_soft_directions(
    project_key: Callable[[Tensor], Tensor], project_value: Callable[[Tensor], Tensor], spec: FromWholeState
) -> Callable[[Tensor], KeyValue]:
    """Return the function to key and value of each head, the first parts of unit vectors along [K_h x; ε‖x‖]."""

    def directions(x: Tensor) -> KeyValue:
        length = spec.softness * _length(x)
        return KeyValue(_soften(project_key(x), length, spec.heads), _soften(project_value(x), length, spec.heads))

    return directions


def _length(x: Tensor) -> Tensor:
    """Return ‖x‖, (*b, 1). Squares neither overflow nor underflow."""
    return (unit(x) * x).sum(-1, keepdim=True)


def _soften(y: Tensor, length: Tensor, heads: int) -> Tensor:
    """Return the first part of a unit vector along [y; length] for each part of y that belongs to a head."""
    if heads > 1:
        y, length = y.unflatten(-1, (heads, -1)), length.unsqueeze(-2)
    return unit(torch.cat((y, length.expand(*y.shape[:-1], 1)), -1))[..., :-1]


def _normalize(y: Tensor, heads: int) -> Tensor:
    """Return a unit vector per head, (*b, n) or (*b, heads, n / heads)."""
    return unit(y if heads == 1 else y.unflatten(-1, (heads, -1)))


def _span_plane(key: Tensor, value: Tensor, dot: float | None) -> KeyValue:
    return KeyValue(key if dot is None else fix_dot_product(key, value, dot), value)


def _stack_heads(projection: Projection, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return the matrices of all heads, (heads, m, m), and their biases, (heads, m), or None."""
    projection.refresh()
    parts = projection.split_heads()
    biases = [part.bias.to(dtype) for part in parts if isinstance(part, Biased)]
    return torch.stack([part.dense().to(dtype) for part in parts]), torch.stack(biases) if biases else None
