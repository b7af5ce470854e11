"""The quickstart: at a size that takes seconds and, marked slow, at full size."""

import json
import subprocess
import sys

import pytest
import torch

from adptnet_lab import cli
from adptnet_lab.cli import quickstart


@pytest.fixture
def single():
    """Use float32, as the quickstart does for users."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("single")
def test_the_quickstart_writes_its_table_figure_and_numbers(tmp_path, capsys):
    output = tmp_path / "runs" / "quickstart"
    assert cli.main(["quickstart", "--output", str(output), "--steps", "3", "--width", "8"]) == 0
    printed = capsys.readouterr().out
    for word in ("ADPTNet β=0", "ADPTNet β=4", "ReLU RNN", "chance is 16.7", "quickstart.png"):
        assert word in printed
    assert (output / "quickstart.png").read_bytes()[:4] == b"\x89PNG"
    numbers = json.loads((output / "quickstart.json").read_text())
    assert list(numbers["models"]) == ["ADPTNet β=0", "ADPTNet β=1", "ADPTNet β=4", "ReLU RNN"]
    row = numbers["models"]["ADPTNet β=1"]
    assert len(row["losses"]) == 3
    assert set(row["scores"]) == {"8", "16", "32"}
    assert len(row["scores"]["32"]["per_position"]) == 32
    assert len(row["eigenvalues"]["trained"]) == 8
    assert numbers["models"]["ReLU RNN"]["eigenvalues"]["trained"] is None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("single")
def test_the_quickstart_has_the_results_of_the_readme(tmp_path):
    models = quickstart.run(quickstart.Quickstart(output=tmp_path))["models"]
    accuracy = {name: [100 * s["accuracy"] for s in row["scores"].values()] for name, row in models.items()}
    assert 60 < accuracy["ADPTNet β=0"][0] < 75
    assert accuracy["ADPTNet β=0"][2] < 20
    for name in ("ADPTNet β=1", "ADPTNet β=4"):
        assert accuracy[name][0] > 99.5
        assert accuracy[name][1] > 90
        assert accuracy[name][2] > 40


def test_a_misspelt_option_is_answered_with_the_closest(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["quickstart", "--stesp", "3"])
    assert stop.value.code == 2
    assert "--steps" in capsys.readouterr().err


def test_python_dash_m_adptnet_shows_its_commands():
    shown = subprocess.run([sys.executable, "-m", "adptnet", "--help"], capture_output=True, text=True, check=True)
    assert "quickstart" in shown.stdout
