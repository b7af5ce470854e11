"""Full and read-only disks: a clear error, nothing damaged, and the bits of an uninterrupted run once there is room."""

import json
import subprocess

import pytest
from safetensors.torch import load_file

from adptnet_lab.training import checkpoint_store, read_metrics, read_result
from support.small_runs import run_command_in_process, start_process

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
    """A tmpfs whose size can be changed."""

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
    """Return a command, and the numbers that it writes to a disk with room."""
    whole = tmp_path_factory.mktemp("whole")
    code, printed = run_command(request.param, whole, whole / "printed")
    assert code == 0, printed
    return request.param, read_contents(request.param, whole)


def run_command(name, folder, printed):
    """Run a command and return its exit code and what it printed."""
    arguments, _ = COMMANDS[name]
    process = start_process(run_command_in_process, [*arguments, folder / "a" if name == "train" else folder], printed)
    process.join()
    said = printed.read_text()
    printed.unlink()
    assert "Traceback" not in said, printed
    return process.exitcode, " ".join(said.split())


def read_contents(name, folder):
    """Return the numbers that are in a folder; every file must be intact."""
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
            found[run.name, "test"] = read_result(run)["test"]
        for line in read_metrics(run / "metrics.jsonl"):
            found[run.name, line["step"]] = line
        checkpoint_store.CheckpointStore(run / "checkpoints").read_newest()
    return found


def test_a_full_disk_is_named_and_with_room_again_the_bits_are_the_same(command, disk, tmp_path):
    name, whole = command
    failures = 0
    for number, size in enumerate(SIZES[name]):
        folder = disk.path / str(number)
        used = sum(path.stat().st_blocks // 2 for path in disk.path.rglob("*"))
        disk.remount(f"size={used + size}k")
        for _ in range(2):
            code, printed = run_command(name, folder, tmp_path / "printed")
            failures += code
            if code:
                assert code == 1
                assert str(folder) in printed
                assert "No space left on device" in printed or "is full" in printed, printed
            done = read_contents(name, folder)
            assert done.items() <= whole.items()
        disk.remount("size=20m")
        code, printed = run_command(name, folder, tmp_path / "printed")
        assert code == 0, printed
        assert read_contents(name, folder) == whole
    assert failures >= 2


def test_a_disk_that_is_read_only_is_named_and_stays_as_it_was(command, disk, tmp_path):
    name, whole = command
    disk.remount("size=20m")
    (disk.path / "empty").mkdir()
    code, _ = run_command(name, disk.path / "used", tmp_path / "printed")
    assert code == 0
    for path in [*disk.path.rglob("result.json"), *disk.path.rglob("fig-cayley*.jsonl")]:
        path.unlink()  # so that something is left to do
    before = {path: path.read_bytes() for path in disk.path.rglob("*") if path.is_file()}
    disk.remount("ro")
    for folder in ("empty", "used", "new"):
        code, printed = run_command(name, disk.path / folder, tmp_path / "printed")
        assert code == 1
        assert f"{disk.path / folder}" in printed
        assert "Read-only file system" in printed
    assert {path: path.read_bytes() for path in disk.path.rglob("*") if path.is_file()} == before
    disk.remount("rw")
    code, _ = run_command(name, disk.path / "used", tmp_path / "printed")
    assert code == 0
    assert read_contents(name, disk.path / "used") == whole
