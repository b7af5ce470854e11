"""The ctypes mirrors of the kernels' C++ structures, read from the C++ sources."""

import ctypes
import re
from pathlib import Path
from typing import Any

__all__ = ["read_structure"]

_TYPES: dict[str, Any] = {"int64_t": ctypes.c_int64, "double": ctypes.c_double}
_STATEMENT = re.compile(r"(?:const )?(\w+)\s*(.*)", re.DOTALL)
_structures: dict[tuple[str, str], Any] = {}
_DECLARATOR = re.compile(r"\s*([*\s]|const\b)*(?P<name>\w+)\s*")


def read_structure(source: Path, name: str) -> Any:
    """Return the ctypes mirror of a C++ structure, the same type at every call.

    The C++ source is the only definition of the structure. Its members may be `int64_t`, `double`, pointers, and
    structures of the same file. An instance has these members and `tensors`, which may keep memory alive; setting any
    other attribute raises an error.

    Args:
        source: The C++ file that defines it.
        name: The name of the structure.

    Raises:
        ValueError: There is no such structure, or it has a member of another type.
    """
    key = str(source), name
    structure = _structures.get(key)
    if structure is None:
        # Threads may read it at the same time. ctypes accepts one type only, so all must get that of the first.
        structure = _structures.setdefault(key, _read(source, name))
    return structure


def _read(source: Path, name: str) -> Any:
    code = re.sub(r"//[^\n]*", "", source.read_text(encoding="utf-8"))
    found = re.search(rf"\bstruct {name} {{(.*?)\n}};", code, re.DOTALL)
    if found is None:
        raise ValueError(f"{source} defines no struct {name}.")
    fields = [
        field for statement in found[1].split(";") if statement.strip() for field in _read_fields(source, statement)
    ]
    return type(name, (ctypes.Structure,), {"_fields_": fields, "__slots__": ("tensors",)})


def _read_fields(source: Path, statement: str) -> list[tuple[str, Any]]:
    """Return name and ctypes type of each member that a declaration such as `const float *a, *b` declares."""
    declaration = _STATEMENT.fullmatch(statement.strip())
    fields: list[tuple[str, Any]] = []
    for declarator in declaration[2].split(",") if declaration else []:
        member = _DECLARATOR.fullmatch(declarator)
        if declaration is None or member is None:
            break
        if "*" in declarator:
            kind: Any = ctypes.c_void_p
        elif declaration[1] in _TYPES:
            kind = _TYPES[declaration[1]]
        else:
            kind = read_structure(source, declaration[1])
        fields.append((member["name"], kind))
    else:
        if fields:
            return fields
    raise ValueError(f"{source}: `{statement.strip()}` is not a declaration that can be mirrored.")
