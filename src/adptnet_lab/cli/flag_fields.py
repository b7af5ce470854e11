"""The fields of a spec as flags, whose values are typed as the spec prints."""

import ast
import collections.abc
import dataclasses
import typing
from typing import Annotated, Any

import docstring_parser  # a dependency of tyro
import tyro
from tyro.constructors import PrimitiveConstructorSpec

from adptnet.errors import SpecError
from adptnet.spec import Spec, known_specs, suggest_name

from .. import baselines  # noqa: F401 - makes their specs known

__all__ = ["Field", "field_types", "make_group", "own_fields", "parse_value"]

Field = tuple[str, Any, Any]  # name, type and default, as `dataclasses.make_dataclass` takes them


def parse_value(text: str, expected: tuple[type, ...] = (Spec,)) -> Any:
    """Parse the printed form of a spec, number, text, tuple or None, such as "Negative(S4DReal(), 0.5)".

    Args:
        text: What was typed. The name of a spec alone stands for the spec with all of its defaults.
        expected: The kinds of spec that an error about an unknown name suggests, and float where numbers are valid too.

    Raises:
        SpecError: The text is not of this form, or the values do not fit the spec.
    """
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body, expected)
    except SyntaxError:
        raise SpecError(f"{text!r} is neither a number nor a spec such as Linspace(dt_min=0.001).") from None


def _evaluate(node: ast.expr, expected: tuple[type, ...] = (Spec,)) -> Any:
    if isinstance(node, ast.Name):
        return _find_spec(node.id, expected)()
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        kind = _find_spec(node.func.id, expected)
        keywords = {str(keyword.arg): _evaluate(keyword.value) for keyword in node.keywords}
        known = [field.name for field in dataclasses.fields(kind)]
        for name in keywords:
            if name not in known:
                raise SpecError(f"{kind.__name__} has no field {name!r}.{suggest_name(name, known)}")
        try:
            return kind(*map(_evaluate, node.args), **keywords)
        except TypeError as error:
            raise SpecError(f"{ast.unparse(node)}: {error}.") from None
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(map(_evaluate, node.elts))
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise SpecError(f"{ast.unparse(node)} is neither a number nor a spec such as Linspace(dt_min=0.001).") from None


def _find_spec(name: str, expected: tuple[type, ...]) -> type[Spec]:
    """Return the spec of this name, in any case."""
    known = known_specs()
    found = known.get(name) or {other.lower(): kind for other, kind in known.items()}.get(name.lower())
    if found is None:
        fitting = [other for other, kind in known.items() if issubclass(kind, expected)]
        if float in expected:
            raise SpecError(f"{name!r} is not a number, a tuple of numbers, or one of: {', '.join(sorted(fitting))}.")
        raise SpecError(f"there is no spec {name!r}.{suggest_name(name, fitting)}")
    return found


def make_group(name: str, specs: list[type], fields: list[Field], **help_texts: str) -> Field:
    """Return a field whose type is a dataclass of `fields`. Help is in `help_texts` or the docstrings of `specs`.

    Args:
        name: The name of the field.
        specs: The classes that the fields are from.
        fields: The fields.
        help_texts: Help by the name of the field.
    """
    texts = {**_read_help(specs), **help_texts}
    helped = [(n, Annotated[kind, tyro.conf.arg(help=texts[n])] if n in texts else kind, v) for n, kind, v in fields]
    group = dataclasses.make_dataclass(name.capitalize(), helped, frozen=True)
    group.__doc__ = f"{specs[0].__name__}."
    return name, group, group()


def _read_help(specs: list[type]) -> dict[str, str]:
    """Return what the sections `Attributes:` in the docstrings of specs and their bases say on each field."""
    texts: dict[str, str] = {}
    for spec in specs:
        for kind in spec.__mro__[:-1]:
            for entry in docstring_parser.parse(kind.__doc__ or "").params:
                for name in entry.arg_name.split(", "):  # fields that share an entry
                    texts.setdefault(name, " ".join((entry.description or "").split()))
    return texts


def own_fields(spec: Any) -> list[Field]:
    """Return the fields of a spec, with its values as defaults.

    Args:
        spec: The spec.
    """
    return [(name, kind, getattr(spec, name)) for name, kind in field_types(type(spec)).items()]


def field_types(kind: type) -> dict[str, Any]:
    """Return the types of a spec's fields for tyro. A field that may hold a spec or a function is typed as it prints.

    Those functions that can be typed, such as surrogate gradients, are specs.

    Args:
        kind: The class of the spec.
    """
    hints = typing.get_type_hints(kind)
    found = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        options = typing.get_args(hint) or (hint,)
        specs = tuple(option for option in options if isinstance(option, type) and issubclass(option, Spec))
        is_function = typing.get_origin(hint) is collections.abc.Callable
        expected = (*specs, float) if float in options else specs or (Spec,)
        found[field.name] = Annotated[hint, _as_printed(expected)] if specs or is_function else hint
    return found


def _as_printed(expected: tuple[type, ...]) -> PrimitiveConstructorSpec[Any]:
    """Return the rule by which tyro parses and prints a field that holds a spec, `expected` as in `parse_value`."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="SPEC",
        instance_from_str=lambda words: parse_value(words[0], expected),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [repr(value)],
    )
