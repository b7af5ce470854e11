"""Specs: the description of a model, without tensors.

A member of a model axis is a frozen dataclass marked with `@spec`. It can be printed, compared, written as JSON
and read back, and its `build` makes the `nn.Module`. Checkpoints and result rows store the spec; there is no
other configuration system.
"""

import abc
import dataclasses
import difflib
import functools
import importlib.metadata
import json
import math
import numbers
import types
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, TypeVar, Union, cast, dataclass_transform, get_args, get_origin

import torch
from torch import nn

from ._io.untrusted import parse_json
from ._typing import Device, DType
from .errors import AdptnetError, IncompatibleError, SpecError

__all__ = [
    "MAX_DEPTH",
    "SPEC_VERSION",
    "ModuleSpec",
    "Spec",
    "check_fraction",
    "check_kind",
    "check_nonnegative",
    "check_positive",
    "check_scale",
    "check_seed",
    "check_size",
    "known_specs",
    "nearest",
    "reject_unknown",
    "reset_from_spec",
    "spec",
]

SPEC_VERSION = 1
MAX_DEPTH = 32  # specs and tuples inside one another; the deepest model of the package has 8

_kinds: dict[str, type["Spec"]] = {}


class Spec:
    """Base of every spec. Mark a concrete one with `@spec`."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def to_json(self) -> str:
        """This spec as text, with the version of the format."""
        return json.dumps({"adptnet_spec": SPEC_VERSION, "spec": _encode(self, type(self).__name__)}, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> "Spec":
        """Return the spec that `to_json` wrote.

        Raises:
            SpecError: Text that is not JSON, unknown types and fields, values that do not fit, a newer version.
        """
        try:
            document = parse_json(text)
        except (ValueError, TypeError) as error:
            raise SpecError(f"A spec is JSON as written by spec.to_json(); this text is not JSON: {error}.") from None
        if not isinstance(document, dict) or "adptnet_spec" not in document or "spec" not in document:
            raise SpecError(
                f'A spec document has the keys "adptnet_spec" and "spec"; got {_shown(document)}. '
                "Write one with spec.to_json()."
            )
        version = document["adptnet_spec"]
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise SpecError(f'"adptnet_spec" is the format\'s version, a whole number from 1; got {_shown(version)}.')
        if version > SPEC_VERSION:
            raise SpecError(
                f"This spec has version {_shown(version)}; this adptnet reads versions up to {SPEC_VERSION}. "
                "It was written by a newer adptnet: pip install --upgrade adptnet."
            )
        unknown = sorted(set(document) - {"adptnet_spec", "spec"})
        if unknown:
            raise SpecError(f"A spec document has no key {_shown(unknown[0])}; it has adptnet_spec and spec.")
        decoded = _decode(document["spec"], "spec")
        if not isinstance(decoded, Spec):
            raise SpecError(f'"spec" must be an object with a "type"; got {_shown(document["spec"])}.')
        return decoded


class ModuleSpec(Spec, abc.ABC):
    """A spec of a whole module, which can be built from it alone: what `save` and `load` take."""

    @abc.abstractmethod
    def build(self, *, device: Device = None, dtype: DType = None) -> Any:
        """Makes the module."""


def reset_from_spec(module: nn.Module, spec: ModuleSpec) -> None:
    """Draw the parameters of `module` again, in place, as building it from `spec` does; buffers start again too."""
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
    fresh: nn.Module = spec.build(device=like.device, dtype=like.dtype)
    try:
        module.load_state_dict(fresh.state_dict())
    except RuntimeError as error:
        raise IncompatibleError(
            f"reset_parameters: this {type(module).__name__} has other parameters than its spec builds. Remove "
            f"parametrizations, pruning and adapters first, or build it anew: module.spec.build(). {error}"
        ) from None


def reject_unknown(owner: str, given: Iterable[str], known: Iterable[str], **renamed: str) -> None:
    """Raise `SpecError` for the first argument in `given`, with the name to write instead; `renamed` says which."""
    for name in given:
        instead = f" Pass {renamed[name]}=." if name in renamed else nearest(name, known)
        raise SpecError(f"{owner} has no argument {name!r}.{instead}")


_S = TypeVar("_S", bound=type[Spec])


@dataclass_transform(frozen_default=True)
def spec(cls: _S) -> _S:
    """Makes `cls` a frozen dataclass and lets `Spec.from_json` find it by its name."""
    checks: Callable[[Any], None] | None = getattr(cls, "__post_init__", None)

    def __post_init__(self: Any) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is bool and not isinstance(value, bool):
                raise SpecError(f"{cls.__name__}({field.name}={_shown(value)}): must be True or False.")
            object.__setattr__(self, field.name, _plain(value))
        if checks is not None:
            try:
                checks(self)
            except AdptnetError:
                raise
            except Exception:  # a check met a value of another type than its field has
                _check_types(self)
                raise
        _check_types(self)

    cls.__post_init__ = __post_init__  # type: ignore[attr-defined]
    made = cast(_S, dataclasses.dataclass(frozen=True)(cls))
    known = _kinds.get(made.__name__)
    if known is not None and (known.__module__, known.__qualname__) != (made.__module__, made.__qualname__):
        raise SpecError(
            f"Two specs are called {made.__name__}: {known.__module__}.{known.__qualname__} and "
            f"{made.__module__}.{made.__qualname__}. Rename one; JSON finds a spec by its name."
        )
    _kinds[made.__name__] = made
    return made


def known_specs() -> dict[str, type[Spec]]:
    """Every spec that was imported, by the name it has in JSON."""
    return dict(_kinds)


def _plain(value: Any) -> Any:
    """Numbers of other libraries as Python's own, lists as tuples."""
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item) for item in value)
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, (bool, float, int)) else value


def _check_types(made: Any) -> None:
    """Raise `SpecError` at the first field of a spec whose value does not fit its annotation."""
    for field in dataclasses.fields(made):
        value = getattr(made, field.name)
        if not _fits(value, field.type):
            expected = field.type.__name__ if isinstance(field.type, type) else str(field.type).replace("typing.", "")
            raise SpecError(f"{type(made).__name__}({field.name}={_shown(value)}): must be {expected}.")


def _fits(value: Any, kind: Any) -> bool:
    """Whether an annotation allows a value. Whole numbers have 64 bits, others are finite; unknown annotations fit."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if origin in (Union, types.UnionType):
        return any(_fits(value, choice) for choice in arguments)
    if origin is tuple and isinstance(value, tuple):
        if arguments[-1:] == (...,):
            arguments = arguments[:1] * len(value)
        return len(value) == len(arguments) and all(map(_fits, value, arguments))
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    if kind is float:
        return _is_number(value)
    expected = origin or kind
    if expected in (bool, str, tuple, types.NoneType) or (isinstance(expected, type) and issubclass(expected, Spec)):
        return isinstance(value, expected)
    return True


def _check_depth(depth: int, where: str) -> None:
    if depth > MAX_DEPTH:
        raise SpecError(f"{_shown(where)}: more than {MAX_DEPTH} specs inside one another. Take some of them away.")


def _encode(value: Any, where: str, depth: int = 1) -> Any:
    _check_depth(depth, where)
    if isinstance(value, Spec):
        fields = {
            f.name: _encode(getattr(value, f.name), f"{where}.{f.name}", depth + 1) for f in dataclasses.fields(value)
        }
        return {"type": type(value).__name__, **fields}
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if _is_number(value):
        return float(value)
    if isinstance(value, tuple):
        return [_encode(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise SpecError(
        f"{where} = {_shown(value)} cannot go into a spec; it holds specs, finite numbers, text, None and tuples."
    )


@functools.cache
def _import_specs() -> None:
    """Import the modules that installed packages list under the entry point `adptnet.specs`, once."""
    for entry in importlib.metadata.entry_points(group="adptnet.specs"):
        entry.load()


def _decode(value: Any, where: str, depth: int = 1) -> Any:
    _check_depth(depth, where)
    if isinstance(value, list):
        return tuple(_decode(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value))
    if not isinstance(value, dict):
        return value
    name = value.get("type")
    if isinstance(name, str) and name not in _kinds:
        _import_specs()
    if not isinstance(name, str) or name not in _kinds:
        raise SpecError(f"{where} has the type {_shown(name)}, which is unknown here.{nearest(str(name), _kinds)}")
    kind = _kinds[name]
    known = [f.name for f in dataclasses.fields(kind)]
    for field in value:
        if field != "type" and field not in known:
            raise SpecError(f"{where}: {name} has no field {_shown(field)}.{nearest(field, known)}")
    fields = {key: _decode(item, f"{where}.{key}", depth + 1) for key, item in value.items() if key != "type"}
    try:
        return kind(**fields)
    except AdptnetError:
        raise
    except Exception as error:  # the text comes from outside: whatever stops a spec is the text's fault
        raise SpecError(f"{where}: {name} cannot be made from {_shown(fields)}: {error}.") from None


def nearest(name: str, known: Iterable[str]) -> str:
    """A closing sentence for an error: the likeliest of `known`, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f" Perhaps you meant {close[0]!r}." if close else f" Known: {', '.join(names)}."


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or nesting without end
        text = f"a {type(value).__name__} too long to print"
    return text if len(text) <= 120 else text[:117] + "..."


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number beyond floating point
        return False


def check_positive(owner: object, **values: float) -> None:
    """Raises unless every value is a finite number above zero."""
    for name, value in values.items():
        if not _is_number(value) or value <= 0:
            raise SpecError(f"{type(owner).__name__}({name}={_shown(value)}): {name} must be a positive number.")


def check_nonnegative(owner: object, **values: float) -> None:
    """Raises unless every value is a finite number, zero or above."""
    for name, value in values.items():
        if not _is_number(value) or value < 0:
            raise SpecError(f"{type(owner).__name__}({name}={_shown(value)}): {name} must be a number, zero or above.")


def check_scale(owner: object, **values: float) -> None:
    """Raises unless every value is positive and leaves room for products and exponentials in float32."""
    check_positive(owner, **values)
    for name, value in values.items():
        if not 1e-15 <= value <= 1e15:
            raise SpecError(f"{type(owner).__name__}({name}={_shown(value)}): {name} must be between 1e-15 and 1e15.")


def check_seed(owner: object, **values: Any) -> None:
    """Raises unless every value is a whole number that seeds a generator."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
            raise SpecError(f"{type(owner).__name__}({name}={_shown(value)}): {name} must be a whole number from 0.")


def check_fraction(owner: object, *, below: str, **values: float) -> None:
    """Raises unless every value is in [0, 1); `below` says why one whole is refused."""
    for name, value in values.items():
        if not _is_number(value) or not 0 <= value < 1:
            raise SpecError(f"{type(owner).__name__}({name}={_shown(value)}): {name} must be in [0, 1); {below}.")


def check_size(owner: object, **values: Any) -> None:
    """Raises unless every value is a whole number from 1."""
    for name, value in values.items():
        if not _is_number(value) or not isinstance(value, numbers.Integral) or not 1 <= int(value) < 2**31:
            raise SpecError(f"{type(owner).__name__}({name}={_shown(value)}): {name} must be a whole number from 1.")


def check_kind(owner: object, kind: type, example: str, **values: object) -> None:
    """Raises unless every value is a `kind`; `example` is what to type."""
    for name, value in values.items():
        if not isinstance(value, kind):
            hint = f"{value.__name__}()" if isinstance(value, type) and issubclass(value, kind) else example
            raise SpecError(
                f"{type(owner).__name__}({name}={_shown(value)}): {name} must be a {kind.__name__}. Pass {name}={hint}."
            )
