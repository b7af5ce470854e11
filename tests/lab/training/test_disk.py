"""Full and read-only disks: a clear error, nothing damaged, and the bits of an uncut run once there is room again."""

import json
import subprocess

import pytest
from safetensors.torch import load_file

from adptnet_lab.training import finished, read_metrics, store
from support.small_runs import command_in, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = ["--model.width", "4", "--task.length", "5", "--training.batch-size", "4", "--training.evaluation-size", "8"]
SMALL += ["--training.steps", "20", "--keep.steps", "5"]
COMMANDS = {
    "train": (["train", "word-problem", *SMALL, "--training.snapshot-steps", "8", "--resume", "--output"], "a"),
    "sweep": (["sweep", "word-problem", *SMALL, "--grid", "model.beta", "0", "1", "--output"], "*"),
    "reproduce": (["reproduce", "table:error_summary", "fig:cayley_ablation", "--scale", "smoke", "--rows"], ""),
}
SIZES = {"train": (4, 16, 24, 40, 56), "sweep": (4, 24, 88), "reproduce": (4, 12)}  # KiB


class Disk:
    """A disk of its own, whose size can be changed."""

    def __init__(self, path):
        path.mkdir()
        self.path = path
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", path], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"mount needs root, and a system that lets it: {made.stderr.strip()}")

    def remount(self, options):
        subprocess.run(["mount", "-o", f"remount,{options}", self.path], check=True)

    def remove(self):
        subprocess.run(["umount", self.path], check=True)


@pytest.fixture
def disk(tmp_path):
    made = Disk(tmp_path / "disk")
    yield made
    made.remove()


@pytest.fixture(scope="module", params=COMMANDS)
def command(request, tmp_path_factory):
    """A command, and what it leaves on a disk with room."""
    whole = tmp_path_factory.mktemp("whole")
    code, said = run_command(request.param, whole, whole / "printed")
    assert code == 0, said
    return request.param, contents(request.param, whole)


def run_command(name, folder, printed):
    """Return the exit code and what was printed."""
    arguments, _ = COMMANDS[name]
    process = start(command_in, [*arguments, folder / "a" if name == "train" else folder], printed)
    process.join()
    said = printed.read_text()
    printed.unlink()
    assert "Traceback" not in said, said
    return process.exitcode, " ".join(said.split())


def contents(name, folder):
    """Return the numbers of what was done in a folder; all of it must be whole."""
    if name == "reproduce":
        rows = [json.loads(line) for path in folder.rglob("*.jsonl") for line in path.read_bytes().splitlines()]
        return {json.dumps([row["label"], row["settings"], row["seed"]]): json.dumps(row["numbers"]) for row in rows}
    found = {}
    for run in folder.glob(COMMANDS[name][1]):
        if (run / "model.safetensors").exists():
            found[run.name, "weights"] = {
                part: tensor.tolist() for part, tensor in load_file(run / "model.safetensors").items()
            }
        if (run / "result.json").exists():
            found[run.name, "test"] = finished(run)["test"]
        for line in read_metrics(run / "metrics.jsonl"):
            found[run.name, line["step"]] = line
        store.Store(run / "checkpoints").newest()
    return found


def test_a_full_disk_is_named_and_with_room_again_the_bits_are_the_same(command, disk, tmp_path):
    name, whole = command
    failures = 0
    for number, size in enumerate(SIZES[name]):
        folder = disk.path / str(number)
        used = sum(path.stat().st_blocks // 2 for path in disk.path.rglob("*"))
        disk.remount(f"size={used + size}k")
        for _ in range(2):
            code, said = run_command(name, folder, tmp_path / "printed")
            failures += code
            if code:
                assert code == 1
                assert str(folder) in said
                assert "No space left on device" in said or "is full" in said, said
            done = contents(name, folder)
            assert done.items() <= whole.items()
        disk.remount("size=20m")
        code, said = run_command(name, folder, tmp_path / "printed")
        assert code == 0, said
        assert contents(name, folder) == whole
    assert failures >= 2


def test_a_disk_that_is_read_only_is_named_and_stays_as_it_was(command, disk, tmp_path):
    name, whole = command
    disk.remount("size=20m")
    (disk.path / "empty").mkdir()
    code, _ = run_command(name, disk.path / "used", tmp_path / "printed")
    assert code == 0
    for path in [*disk.path.rglob("result.json"), *disk.path.rglob("fig-cayley*.jsonl")]:
        path.unlink()  # something is left to do
    before = {path: path.read_bytes() for path in disk.path.rglob("*") if path.is_file()}
    disk.remount("ro")
    for folder in ("empty", "used", "new"):
        code, said = run_command(name, disk.path / folder, tmp_path / "printed")
        assert code == 1
        assert f"{disk.path / folder}" in said
        assert "Read-only file system" in said
    assert {path: path.read_bytes() for path in disk.path.rglob("*") if path.is_file()} == before
    disk.remount("rw")
    code, _ = run_command(name, disk.path / "used", tmp_path / "printed")
    assert code == 0
    assert contents(name, disk.path / "used") == whole
