"""The ctypes mirrors of the kernels' structures, against the compiler's own layout."""

import ctypes
import importlib
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from adptnet.ops import _build, _structures
from adptnet.ops._structures import read_structure
from adptnet.ops.adpt_scan import Constants, Factors
from support.kernels import SOURCES, needs_compiler

# Each structure that an operation passes to its kernel, and the file that defines it.
STRUCTURES = {
    "adpt_layer": ("kernel.cpp", "Layer"),
    "adpt_layer, backward": ("drive_gradients.h", "DriveGradients"),
    "adpt_scan": ("arguments.h", "Scan"),
    "adpt_step": ("kernel.cpp", "Step"),
    "linear_scan": ("kernel.cpp", "Scan"),
    "matrix_chain": ("kernel.cpp", "Chain"),
    "plane_rotation": ("kernel.cpp", "Rotation"),
}


def folder_of(key):
    return SOURCES / key.partition(",")[0] / "csrc"


def mirror(key):
    file, name = STRUCTURES[key]
    return read_structure(folder_of(key) / file, name)


def offsets(structure, prefix="", start=0):
    """Return the offset of every member by its C++ name; those of nested structures as `outer.inner`."""
    found = {}
    for name, kind in structure._fields_:
        offset = start + getattr(structure, name).offset
        if issubclass(kind, ctypes.Structure):
            found |= offsets(kind, f"{prefix}{name}.", offset)
        else:
            found[f"{prefix}{name}"] = offset
    return found


def compare_with_compiler(operation, structure, folder):
    """Compile the kernel with one assertion per member; return the compiler's messages, empty if all hold."""
    name = STRUCTURES[operation][1]
    lines = ["#include <cstddef>", f'#include "{folder_of(operation) / "kernel.cpp"}"']
    lines += [f'static_assert(offsetof({name}, {at}) == {n}, "{at}");' for at, n in offsets(structure).items()]
    lines += [f'static_assert(sizeof({name}) == {ctypes.sizeof(structure)}, "size");']
    program = folder / "layout.cpp"
    program.write_text("\n".join(lines))
    command = [*_build.find_compiler(), "-std=c++17", "-fsyntax-only", "-DSCALAR=double", str(program)]
    return subprocess.run(command, capture_output=True, text=True).stderr


@needs_compiler
@pytest.mark.parametrize("operation", STRUCTURES)
def test_every_member_is_where_the_compiler_puts_it(operation, tmp_path):
    structure = mirror(operation)
    assert compare_with_compiler(operation, structure, tmp_path) == ""
    # All members have eight bytes, so none is missing if they fill the structure.
    assert 8 * len(offsets(structure)) == ctypes.sizeof(structure)


@needs_compiler
def test_a_swapped_pair_of_members_is_found(tmp_path):
    first, second, *rest = mirror("adpt_step")._fields_
    swapped = type("Step", (ctypes.Structure,), {"_fields_": [second, first, *rest]})
    assert compare_with_compiler("adpt_step", swapped, tmp_path).count("static assertion failed") == 2


@pytest.mark.parametrize("operation", STRUCTURES)
def test_an_operation_uses_the_structure_that_is_compared(operation):
    module = importlib.import_module(f"adptnet.ops.{operation.partition(',')[0]}.cpu")
    name = STRUCTURES[operation][1]
    used = module._mirror(name) if operation.startswith(("adpt_scan", "adpt_layer")) else module._mirror()
    assert used is mirror(operation)


def test_pointers_of_a_scan_are_in_the_order_of_the_call():
    """`cpu.py` sets them as one array."""
    arguments = SOURCES / "adpt_scan" / "csrc" / "arguments.h"
    leaves = ["drive", "state", *Constants._fields]
    inputs, gradients = (read_structure(arguments, name) for name in ("Inputs", "Gradients"))
    assert [name for name, _ in inputs._fields_] == [*leaves, "reset", "lengths", *Factors._fields]
    assert [name for name, _ in gradients._fields_] == leaves
    assert {kind for _, kind in (*inputs._fields_, *gradients._fields_)} == {ctypes.c_void_p}


def test_only_members_can_be_set():
    structure = mirror("matrix_chain")
    assert structure(batch=3).batch == 3
    with pytest.raises(AttributeError, match="bach"):
        structure(bach=3)


def test_declarations_of_c_plus_plus_are_read(tmp_path):
    source = tmp_path / "some.h"
    source.write_text(
        "struct Inner {\n  int64_t a, b;  // of a; b\n};\n"
        "struct Outer {\n  Inner inner;\n  const void *const *c, *d;\n  const uint8_t* e;\n  double f;\n};\n"
    )
    outer = read_structure(source, "Outer")
    assert offsets(outer) == {"inner.a": 0, "inner.b": 8, "c": 16, "d": 24, "e": 32, "f": 40}
    assert outer._fields_[0][1] is read_structure(source, "Inner")
    assert [kind for _, kind in outer._fields_[1:]] == [ctypes.c_void_p] * 3 + [ctypes.c_double]


@pytest.mark.parametrize(
    ("member", "message"),
    [
        ("float a", "defines no struct float"),
        ("int64_t a[3]", "not a declaration"),
        ("int64_t", "not a declaration"),
    ],
)
def test_a_member_that_cannot_be_mirrored_raises(member, message, tmp_path):
    source = tmp_path / "some.h"
    source.write_text(f"struct Some {{\n  {member};\n}};\n")
    with pytest.raises(ValueError, match=message):
        read_structure(source, "Some")


def test_threads_that_read_at_the_same_time_get_one_type(tmp_path, monkeypatch):
    source = tmp_path / "some.h"
    source.write_text("struct Some {\n  int64_t a;\n};\n")
    read, together = _structures._read, threading.Barrier(2)

    def read_together(*arguments):
        together.wait(timeout=60)
        return read(*arguments)

    monkeypatch.setattr(_structures, "_read", read_together)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: read_structure(source, "Some"), range(2))
    assert first is second
