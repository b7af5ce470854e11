"""Fuzz tests: mutated files (tests/support/fuzzing.py) raise an error of the package, or are read faithfully."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("h5py", reason="spike files need h5py")
pytest.importorskip("scipy", reason="sound files need scipy")

PROGRAM = Path(__file__).parents[1] / "support" / "fuzzing.py"
MEGABYTES = 200  # memory that reading may use beyond the import
COUNTS = {  # mutated files of each kind in the slow test
    "checkpoints": 5000,
    "specs": 5000,
    "configs": 1000,
    "archives": 3000,
    "pictures": 1500,
    "sounds": 2500,
    "address_events": 1000,
    "spike_files": 2500,
    "packed": 800,
    "rows": 1500,
    "manifests": 1500,
    "metrics": 500,
    "networks": 700,
}


def run(seed, counts):
    """Fuzz in a separate process and return its report; after a crash the error names the file."""
    arguments = [f"{kind}={count}" for kind, count in counts.items()]
    source = str(Path(__file__).parents[2] / "src")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(PROGRAM), str(seed), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"exit {done.returncode} at {done.stderr[-2000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def check(report, counts):
    faults = [fault for found in report.values() for fault in found["faults"]]
    assert not faults, "\n".join(faults)
    for kind, found in report.items():
        assert found.get("accepted", 0) + found.get("rejected", 0) == counts[kind]
        assert found["megabytes"] <= MEGABYTES, f"{kind} took {found['megabytes']} MB"
        assert found.get("rejected", 0) or kind == "metrics", f"no mutation of {kind} was rejected"


def test_mutated_files_are_rejected_or_read_faithfully():
    counts = {kind: count // 20 for kind, count in COUNTS.items()}
    check(run(0, counts), counts)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", COUNTS)
def test_many_mutated_files_are_rejected_or_read_faithfully(kind):
    report = run(1, {kind: COUNTS[kind]})
    print(json.dumps(report))
    check(report, COUNTS)
