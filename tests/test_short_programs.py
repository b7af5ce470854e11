"""The ten short programs of the documentation: each runs alone, as written, and is short."""

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "short-programs.md"
SECTIONS = {
    section.partition("\n")[0]: re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    for section in PAGE.read_text().split("\n## ")[1:]
}


def test_there_are_two_programs_of_at_most_fifteen_lines_for_each_kind_of_user():
    assert [len(programs) for programs in SECTIONS.values()] == [2] * 5
    for programs in SECTIONS.values():
        assert all(len(list(filter(str.strip, program.splitlines()))) <= 15 for program in programs)


@pytest.mark.parametrize("number", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("section", SECTIONS)
def test_a_program_runs_as_written(section, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(SECTIONS[section][number], PAGE.name, "exec"), {"__name__": "__main__"})
