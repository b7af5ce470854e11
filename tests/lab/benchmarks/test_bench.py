"""`adptnet bench`: how it times, what it does not time, and what it writes. No test depends on speed."""

import itertools
import json
import math

import pytest
import torch

from adptnet.errors import InputError
from adptnet.ops.adpt_scan import cpu as adpt_scan_kernel
from adptnet.ops.linear_scan import cpu as linear_scan_kernel
from adptnet_lab import cli
from adptnet_lab.benchmarks import (
    Goal,
    Measurements,
    Side,
    Size,
    Timing,
    checks,
    command,
    fit_slope,
    goals,
    judge_goals,
    machine,
    result_files,
    time_interleaved,
    timing,
)
from adptnet_lab.benchmarks.suite import BENCHMARKS
from adptnet_lab.benchmarks.timing import Samples
from adptnet_lab.paper import svg

pytestmark = pytest.mark.timeout(300)  # kernels are compiled and figures drawn on busy machines

SLOW = {"memory"}  # starts processes
needs_kernels = pytest.mark.skipif(
    not adpt_scan_kernel.has_kernel(torch.float32), reason="nothing to time: no compiler, or ADPTNET_BACKEND=reference"
)
QUICK = [name for name in BENCHMARKS if name not in SLOW]
TINY = {"batch": 2, "steps": 4, "state": 4}


def make_timing(*seconds, wall=None):
    return Timing(Samples(seconds), Samples(wall or seconds), 1, 1.0)


def make_measurements(**least):
    """Return made-up times. Names have underscores in place of spaces, and end with the number of threads."""
    times = {}
    for name, seconds in least.items():
        side, _, threads = name.rpartition("_")
        times[side.replace("_", " "), int(threads)] = make_timing(seconds)
    return Measurements(times)


def make_clock(cost):
    """Return a function that spends time and clocks that show it; CPU time runs at half the speed of wall time."""
    now = {"wall": 0.0}

    def spend(name):
        now["wall"] += cost[name]

    return spend, lambda: (now["wall"] / 2, now["wall"])


def test_sides_are_timed_in_turn_after_a_run_that_does_not_count():
    cost, order = {"a": 1.0, "b": 3.0}, []
    spend, now = make_clock(cost)

    def side(name):
        def run():
            order.append((name, torch.get_num_threads()))
            spend(name)

        return Side(name, run, scale=10.0 if name == "b" else 1.0)

    before = torch.get_num_threads()
    times = time_interleaved([side("a"), side("b")], repeats=3, threads=(1, 2), clocks=now)
    assert torch.get_num_threads() == before
    turn = [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert order == turn * 4
    assert list(times) == turn
    assert times["a", 1].wall.values == (1.0, 1.0, 1.0)
    assert times["b", 2].cpu.values == (15.0, 15.0, 15.0)  # half of three, times ten
    assert times["b", 2].calls == 1


def test_sides_are_repeated_until_time_has_passed_and_no_less_often_than_asked():
    def count_repeats(**options):
        spend, now = make_clock({"a": 1.0, "b": 3.0})
        times = time_interleaved([Side(name, lambda name=name: spend(name)) for name in "ab"], clocks=now, **options)
        assert {len(spent.cpu.values) for spent in times.values()} == {len(times["a", 1].wall.values)}
        return len(times["a", 1].wall.values)

    assert count_repeats(repeats=2, seconds=13.0) == 4  # of four seconds each
    assert count_repeats(repeats=2, seconds=7.0) == 2
    assert count_repeats(repeats=2) == 2
    assert time_interleaved([], repeats=2, seconds=1.0) == {}


def test_a_short_run_is_repeated_within_a_sample():
    spend, now = make_clock({"a": 1e-3})
    times = time_interleaved([Side("a", lambda: spend("a"))], repeats=2, clocks=now)
    assert times["a", 1].calls == 5
    assert times["a", 1].wall.least == pytest.approx(1e-3)


def test_a_side_that_is_warm_runs_once_more_before_each_sample():
    order = []
    sides = [Side(name, lambda name=name: order.append(name), warm=name == "b") for name in "ab"]
    time_interleaved(sides, repeats=2, clocks=lambda: (100.0 * len(order), 100.0 * len(order)))
    assert "".join(order) == "ab" + "abb" * 2


def test_a_side_may_be_for_one_number_of_threads():
    times = time_interleaved([Side("a", lambda: None, threads=1), Side("b", lambda: None)], repeats=1, threads=(1, 2))
    assert list(times) == [("a", 1), ("b", 1), ("b", 2)]


def test_least_and_median():
    spent = Samples((5.0, 1.0, 2.0))
    assert (spent.least, spent.median) == (1.0, 2.0)


def test_verdicts():
    ratio = Goal("a / b", lambda f: f.cpu("a") / f.cpu("b"), at_most=0.5)
    within = Goal("slope", lambda f: f.cpu("a"), at_least=0.95, at_most=1.08)
    claim = Goal("claim", lambda f: f.cpu("a"), at_least=2.0, claim="sec:there")
    wall = Goal("threads", lambda f: f.wall("a") / f.wall("a", 2), at_least=1.5, quiet=True)
    absent = Goal("absent", lambda f: f.cpu("c"), at_most=1.0)
    endless = Goal("endless", lambda f: math.inf, at_most=1.0)
    seen = make_measurements(a_1=1.0, b_1=4.0, a_2=0.9)
    every = judge_goals([ratio, within, claim, wall, absent, endless], seen, others=0.0)
    assert [v.outcome for v in every] == ["met", "met", "fails", "missed", "not measured", "not measured"]
    assert every[0].value == 0.25
    assert every[0].share == 0.5
    assert every[1].share == pytest.approx(0.95)
    assert every[2].claim == "sec:there"
    assert every[3].share == pytest.approx(1.5 / (1 / 0.9))
    assert "c was not measured with 1 thread" in every[4].remark
    assert [v.expected for v in every[:3]] == ["≤ 0.5", "0.95 to 1.08", "≥ 2"]


def test_a_goal_of_wall_time_is_undecided_while_other_processes_are_busy():
    goal = Goal("threads", lambda f: f.wall("a") / f.wall("a", 2), at_least=1.5, quiet=True)
    assert judge_goals([goal], make_measurements(a_1=1.0, a_2=0.9), others=1.4)[0].outcome == "undecided"
    assert judge_goals([goal], make_measurements(a_1=2.0, a_2=1.0), others=1.4)[0].outcome == "met"
    busy = Goal("CPU", lambda f: f.cpu("a"), at_most=0.5)
    assert judge_goals([busy], make_measurements(a_1=1.0), others=1.4)[0].outcome == "missed"


def test_slopes_and_doublings():
    sizes = [2**k for k in range(10, 17)]
    assert fit_slope(sizes, [3e-6 * size for size in sizes]) == pytest.approx(1.0)
    assert fit_slope(sizes, [1e-9 * size**1.5 for size in sizes]) == pytest.approx(1.5)
    assert goals.largest_doubling([1.0, 2.0, 5.0, 9.0]) == 2.5


def test_growth_is_judged_from_times():
    case = BENCHMARKS["growth-time"].make_case(Size(1, 256, 3), True)
    lengths = [4, 8, 16, 32, 64, 128, 256]
    assert [side.name for side in case.sides if side.name.startswith("forward")] == [f"forward, {t}" for t in lengths]
    times = {(f"{kind}, {t}", 1): make_timing(1e-6 * t) for kind in ("forward", "training") for t in lengths}
    times["training, 256", 1] = make_timing(1e-3)
    times |= {(f"products of the forward, {t}", 1): make_timing(1e-6 * t**0.8) for t in lengths}
    outcomes = {v.goal: (v.outcome, v.value) for v in judge_goals(case.goals, Measurements(times))}
    assert outcomes["forward, log-log slope"] == ("met", pytest.approx(1.0))
    assert outcomes["forward, log-log slope / that of its products"] == ("missed", pytest.approx(1 / 0.8))
    assert outcomes["training, log-log slope / that of its products"] == ("not measured", None)
    assert outcomes["forward, largest doubling"] == ("met", pytest.approx(2.0))
    assert outcomes["training, largest doubling"] == ("missed", pytest.approx(1e-3 / 128e-6))


@pytest.mark.parametrize(
    ("benchmark", "size", "pass_instead"),
    [
        ("growth-time", Size(4, 1, 3), "4,2,3"),
        ("growth-time", Size(4, 100, 3), "4,64,3"),
        ("growth-time", Size(4, 96, 3), "4,64,3"),
        ("growth-batch", Size(1, 8, 3), "2,8,3"),
        ("growth-batch", Size(12, 8, 3), "8,8,3"),
    ],
)
def test_a_size_that_doublings_do_not_reach_is_explained(benchmark, size, pass_instead):
    with pytest.raises(InputError, match=f"--sizes {','.join(map(str, size))}: .*Pass --sizes {pass_instead}$"):
        BENCHMARKS[benchmark].make_case(size, True)
    BENCHMARKS[benchmark].make_case(Size(*map(int, pass_instead.split(","))), True)


def test_a_length_may_be_a_multiple_of_the_largest_doubling():
    case = BENCHMARKS["growth-time"].make_case(Size(1, 192, 3), True)
    lengths = [side.name for side in case.sides if side.name.startswith("forward")]
    assert lengths == [f"forward, {3 * 2**k}" for k in range(7)]


def test_products_are_the_faster_of_both():
    case = BENCHMARKS["recurrence"].make_case(Size(8, 3, 4), True)
    names = [side.name for side in case.sides]
    times = {(name, 1): make_timing(1.0) for name in names}
    times |= {("products of the forward, our tiles", 1): make_timing(0.5), ("forward", 1): make_timing(0.55)}
    times |= {("forward", 2): make_timing(0.4), ("training", 1): make_timing(3.0)}
    verdicts = {v.goal: v for v in judge_goals(case.goals, Measurements(times), others=0.0)}
    assert verdicts["forward / products"].value == pytest.approx(1.1)
    assert verdicts["training / products"].value == pytest.approx(3.0 / 2.5)
    assert verdicts["forward, one thread / two"].outcome == "missed"  # 1.375, and the goal is 1.4
    assert verdicts["training, one thread / two"].outcome == "not measured"
    alone = BENCHMARKS["recurrence"].make_case(Size(1, 3, 4), True)
    assert [goal.at_most for goal in alone.goals] == [1.25, 1.6, 1.4]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the folder with the results of every benchmark that starts no processes."""
    folder = tmp_path_factory.mktemp("bench")
    size = ",".join(str(number) for number in TINY.values())
    arguments = ["bench", *QUICK, "--fast", "--sizes", size, "--repeats", "2", "--threads", "1", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "SHORTEST", 0.0)
        patch.setattr(checks, "find_error", lambda operation: None)  # each has a test of its own
        assert cli.main([*arguments, "--output", str(folder)]) == 0
    return folder


@needs_kernels
@pytest.mark.parametrize("name", QUICK)
def test_every_benchmark_runs_and_its_numbers_are_complete(name, results):
    (case,) = result_files.read_results(results, name)["cases"]
    assert case["size"] == TINY
    assert case["fast"]
    assert case["repeats"] == 2
    assert {"adptnet", "torch", "python", "processor", "cores", "kernels", "git"} <= set(case["machine"])
    assert not [what for what in case["machine"]["kernels"].values() if "/" in what]  # no path of this machine
    assert {"load_before", "load_after", "others"} == set(case["neighbours"])
    assert {side["threads"] for side in case["sides"]} == set(BENCHMARKS[name].threads or (1, 2))
    for side, kind in itertools.product(case["sides"], ("cpu", "wall")):
        assert 0 <= side[kind]["least"] <= side[kind]["median"]
    text = (results / f"{name}.md").read_text()
    assert all(f"| {side['side']} |" in text for side in case["sides"])
    assert all(verdict["goal"] in text for verdict in case["verdicts"])


@needs_kernels
def test_the_summary_is_a_page_and_a_figure(results):
    for written in ("summary.md", "summary.svg"):
        assert (results / written).stat().st_size > 100
    text = (results / "summary.md").read_text()
    assert "GPUs is not measured" in text
    assert all(f"[{name}]({name}.md)" in text for name in QUICK)
    assert not [path for path in results.iterdir() if path.name.startswith(".")]  # drafts


@pytest.mark.slow
def test_memory_is_that_of_a_process_of_its_own(tmp_path):
    arguments = ["bench", "memory", "--sizes", "4,512,64", "--repeats", "1", "--output", str(tmp_path)]
    assert cli.main(arguments) == 0
    (case,) = result_files.read_results(tmp_path, "memory")["cases"]
    assert not case["skipped"]
    assert 1 < case["numbers"]["lean, trajectories"] < case["numbers"]["loop in torch, trajectories"]


@needs_kernels
@pytest.mark.parametrize(
    ("kernel", "function", "operation", "benchmark"),
    [
        (adpt_scan_kernel, "forward", "adpt_scan", "widths"),
        (adpt_scan_kernel, "backward", "adpt_scan", "widths"),
        (linear_scan_kernel, "forward", "linear_scan", "scans"),
    ],
)
def test_a_wrong_operation_is_not_timed_and_the_others_are(  # without a figure, which takes seconds
    kernel, function, operation, benchmark, tmp_path, capsys, monkeypatch
):
    right = getattr(kernel, function)

    def wrong(*arguments, **options):
        answer = right(*arguments, **options)
        first = answer if isinstance(answer, torch.Tensor) else answer[0]
        first += 1e-3
        return answer

    monkeypatch.setattr(kernel, function, wrong)
    monkeypatch.setattr(svg, "render_svg", lambda figure, name: "<svg>")
    arguments = ["bench", benchmark, "rotations", "--fast", "--sizes", "2,5,4", "--repeats", "1", "--threads", "1"]
    assert cli.main([*arguments, "--output", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert operation in printed.err
    assert "differs from the reference" in printed.err
    content = json.loads((tmp_path / f"{benchmark}.json").read_text())
    assert content["cases"] == []
    assert operation in content["refused"]
    assert "Not timed" in (tmp_path / f"{benchmark}.md").read_text()
    assert "Not timed" in (tmp_path / "summary.md").read_text()
    assert json.loads((tmp_path / "rotations.json").read_text())["cases"]


def test_without_a_kernel_there_is_nothing_to_time(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ADPTNET_BACKEND", "reference")
    assert cli.main(["bench", "widths", "--output", str(tmp_path)]) == 1
    assert "no compiled kernel" in capsys.readouterr().err
    assert (tmp_path / "summary.svg").exists()  # it shows that nothing was measured


@pytest.mark.parametrize("operation", checks.CHECKS)
def test_every_operation_agrees_with_its_reference(operation):
    assert checks.find_error(operation) is None


def test_cases_of_other_sizes_of_this_machine_and_version_are_kept():
    def case(steps, machine="here"):
        return {"size": {"steps": steps}, "machine": machine, "new": False}

    kept = [case(1), case(2), case(3, "elsewhere")]
    new = {**case(2), "new": True}
    assert result_files.merge_cases(kept, new) == [case(1), new]


def test_results_survive_their_file_and_those_of_version_1_can_be_read(tmp_path):
    timing = Timing(Samples((2.0, 1.0, 4.0)), Samples((3.0, 3.0, 3.0)), 5, 10.0)
    measurements = Measurements({("a", 2): timing}, {"bytes": 1 / 3, "error": math.inf})
    verdicts = judge_goals([Goal("a", lambda m: m.cpu("a", 2), at_most=2.0)], measurements)
    about = {"adptnet": "0.1.0"}
    load = machine.MachineLoad(0.5, 0.25, None)
    case = result_files.describe_case(Size(1, 2, 3), measurements, verdicts, {"b": "absent"}, load, about, repeats=3)
    path = result_files.write_results(tmp_path, "benchmark", "a test", [case, case])
    assert len(path.read_text().splitlines()) == 4  # one line per case
    written = result_files.read_results(tmp_path, "benchmark")
    assert written["cases"][0] == written["cases"][1] == {**case, "numbers": {"bytes": 0.333333333, "error": math.inf}}
    assert written["cases"][0]["sides"][0]["cpu"] == {"least": 1.0, "median": 2.0}
    for clock in ("cpu", "wall"):
        case["sides"][0][clock]["every"] = list(getattr(timing, clock).values)
    earlier = {"version": 1, "subject": "benchmark", "about": "a test", "refused": None, "cases": [case]}
    case["numbers"]["error"] = "inf"
    path.write_text(json.dumps(earlier))
    assert result_files.read_results(tmp_path, "benchmark")["cases"] == [
        {**written["cases"][0], "numbers": {"bytes": 1 / 3, "error": math.inf}}
    ]


@needs_kernels
def test_results_that_change_the_repository_are_of_one_version(tmp_path, monkeypatch):
    real, states = machine.describe_machine(), iter("abcdefgh")
    monkeypatch.setattr(machine, "describe_machine", lambda: {**real, "git": next(states)})
    monkeypatch.setattr(command, "_write_summary", lambda folder: [])
    command.run(command.Bench(("widths",), sizes=("1,8,5", "2,8,5"), repeats=1, threads=(1,), output=tmp_path))
    assert len(result_files.read_results(tmp_path, "widths")["cases"]) == 2


def test_the_list_names_every_benchmark(capsys):
    assert cli.main(["bench", "--list"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{name}: {benchmark.about}" in printed for name, benchmark in BENCHMARKS.items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recurrance"], "recurrence"),
        (["widths", "--sizes", "8,1024"], "batch,steps,state"),
        (["widths", "--sizes", "8,0,2"], "batch,steps,state"),
        (["widths", "--repeats", "-1"], "--repeats -1"),
        (["widths", "--repeats", "0"], "--repeats 0"),
        (["widths", "--threads", "0"], "integers >= 1"),
    ],
)
def test_a_wrong_call_is_explained(arguments, message, tmp_path, capsys):
    assert cli.main(["bench", *arguments, "--output", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err


@needs_kernels
def test_a_file_that_is_not_a_result_is_an_error(tmp_path, capsys):
    (tmp_path / "rotations.json").write_text("{}")
    arguments = ["bench", "rotations", "--fast", "--sizes", "1,2,3", "--repeats", "1", "--output", str(tmp_path)]
    assert cli.main(arguments) == 1
    assert "is not a result of adptnet bench" in capsys.readouterr().err
    assert (tmp_path / "rotations.json").read_text() == "{}"


def test_every_operation_of_a_benchmark_has_a_check():
    assert {name for benchmark in BENCHMARKS.values() for name in benchmark.operations} <= set(checks.CHECKS)
    assert command.Bench().threads == (1, 2)
