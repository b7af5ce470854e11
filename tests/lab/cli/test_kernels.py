"""`adptnet kernels`: the compiled operations, listed and built ahead of their first use."""

from adptnet.ops import _build
from adptnet_lab import cli
from support.kernels import needs_compiler


@needs_compiler
def test_kernels_are_built_ahead_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ADPTNET_CACHE", str(tmp_path))
    monkeypatch.setattr(_build, "OPERATIONS", ["plane_rotation", "matrix_chain"])  # the quickest to compile
    assert cli.main(["kernels", "build"]) == 0
    built = sorted(tmp_path.glob("*.so"))
    assert sorted(capsys.readouterr().out.split()) == [str(path) for path in built]
    assert len(built) == 4  # for float and double
    assert cli.main(["kernels"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{operation}: " in shown for operation in _build.OPERATIONS)
