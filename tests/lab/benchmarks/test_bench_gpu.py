"""`adptnet bench gpu` on an emulated GPU, at tiny sizes: it checks, times, writes and reports."""

import json

import pytest
import torch

from adptnet.errors import AdptnetError, InputError, WrongResultError
from adptnet_lab.benchmarks import command
from adptnet_lab.benchmarks.gpu import kernel_checks, report, timings


@pytest.fixture
def tiny(emulated_gpu, monkeypatch):
    """Return a function that runs the kit on some of its checks and sides."""
    monkeypatch.setattr(kernel_checks, "PROBLEMS", 2)
    monkeypatch.setattr(timings, "REPEATS", 1)

    def run(folder, forms, sides, passes=()):
        monkeypatch.setattr(kernel_checks, "FORMS", {name: kernel_checks.FORMS[name] for name in forms})
        monkeypatch.setattr(timings, "SIDES", {name: timings.SIDES[name] for name in sides})
        checked = kernel_checks.Sizes(scans=((2, 3, 2),), passes=passes)
        path = report.run_gpu(folder, 10, device=torch.device("cpu"), checked=checked, timed=((2, 3, 4),))
        return json.loads(path.read_text())

    return run


def test_the_kit_checks_times_and_writes_one_file(tiny, tmp_path, capsys):
    sides = ("ADPTNet", "nn.GRU", "eager loop", "pararnn-torch, GRU")
    found = tiny(tmp_path, ("plain", "phase", "diagonal"), sides, passes=((1, 3, 2),))
    kernels = {(check["kernel"], check["what"]) for check in found["checks"]}
    expected = {("adpt_scan", "plain"), ("adpt_scan", "phase"), ("adpt_scan", "diagonal"), ("layer", "bfloat16")}
    expected |= {("newton_pass", "Conv-DEER"), ("transposed Jacobians", "plain")}
    assert expected < kernels
    assert {what for kernel, what in kernels if kernel == "linear_scan"} == {"constant", "varying", "complex"}
    assert all(check["passed"] for check in found["checks"])
    times = {row["side"]: row for row in found["times"]}
    assert times.keys() == set(sides)
    assert all(times[side]["training"] > 0 for side in sides[:3])
    assert times[sides[3]]["skipped"]
    assert found["versions"]["triton"]
    shown = capsys.readouterr().out
    assert report.format_row(found) in shown
    assert f"{len(found['checks'])} of {len(found['checks'])}" in shown


def test_a_kernel_that_disagrees_is_reported_and_nothing_is_timed(tiny, tmp_path, monkeypatch):
    wrong = kernel_checks.linear_scan
    monkeypatch.setattr(kernel_checks, "linear_scan", lambda *given, **options: 1.001 * wrong(*given, **options))
    with pytest.raises(WrongResultError, match="linear_scan, constant"):
        tiny(tmp_path, ("plain",), ("nn.GRU",))
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert not found["times"]
    assert {check["kernel"] for check in found["checks"] if not check["passed"]} == {"linear_scan"}


def test_time_that_is_over_is_reported(monkeypatch):
    monkeypatch.setattr(timings, "SIDES", {"nn.GRU": timings.SIDES["nn.GRU"]})
    (measured,) = timings.time_device(torch.device("cpu"), 0.0, ((1, 2, 3),))
    assert "--minutes" in measured.skipped


def test_every_form_of_the_recurrence_has_a_kernel_on_a_gpu(emulated_gpu):
    from adptnet.ops.adpt_scan import explain_unsupported_gpu

    for form, options in kernel_checks.FORMS.values():
        paired, slow = "pairs" in options, "slow" in options
        given = {"paired": paired, "slow": slow, "dtype": torch.float32, "device": "cpu"}
        assert explain_unsupported_gpu(form, 8, **given) is None


def test_without_a_gpu_the_command_says_so(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(AdptnetError, match="needs a GPU"):
        command.run(command.Bench(("gpu",), output=tmp_path))
    with pytest.raises(InputError, match="alone"):
        command.run(command.Bench(("gpu", "scans"), output=tmp_path))
