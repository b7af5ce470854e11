"""What the package shows, and how light it is."""

import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import adptnet

PROJECT = Path(__file__).parent.parent

PUBLIC = [
    *("ADPTNet", "ADPTState", "Bidirectional", "Recurrent", "SequenceModel", "Spec", "Stack", "TrainableBeta"),
    *("__version__", "adjoints", "cells", "conjugates", "directions", "drive", "errors", "load", "nn", "projections"),
    *("retractions", "save", "solvers", "spectra", "verify"),
]


def modules():
    return [name for _, name, _ in pkgutil.walk_packages(adptnet.__path__, "adptnet.") if name != "adptnet.__main__"]


def test_the_public_names_are_these():
    assert sorted(adptnet.__all__) == sorted(PUBLIC)
    assert all(hasattr(adptnet, name) for name in PUBLIC)


@pytest.mark.parametrize("name", modules())
def test_every_module_says_what_it_is_and_names_what_it_shows(name):
    module = importlib.import_module(name)
    assert module.__doc__
    if hasattr(module, "__all__"):
        assert sorted(module.__all__) == sorted(set(module.__all__))
        assert all(hasattr(module, shown) for shown in module.__all__)


def test_importing_adptnet_imports_nothing_heavy():
    heavy = ["matplotlib", "triton", "jaxtyping", "beartype", "tyro", "rich", "safetensors", "scipy", "transformers"]
    code = f"import sys, adptnet; print([m for m in {heavy!r} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_the_version_is_said_once_everywhere():
    project = (PROJECT / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.+)"', project, re.MULTILINE)[1] == adptnet.__version__
    assert f"## {adptnet.__version__}" in (PROJECT / "CHANGELOG.md").read_text()
    assert f"version: {adptnet.__version__}" in (PROJECT / "CITATION.cff").read_text()


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (PROJECT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "docs/recurrence.md"])
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path):
    code = "\n".join(blocks(page))
    assert code
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=tmp_path, check=True, timeout=100)


@pytest.mark.parametrize(
    "page", ["README.md", *sorted(str(p.relative_to(PROJECT)) for p in (PROJECT / "docs").glob("*.md"))]
)
def test_links_between_pages_lead_somewhere(page):
    source = PROJECT / page
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", source.read_text()):
        if "://" not in target:
            assert (source.parent / target).exists(), target


def test_the_paper_map_names_things_that_exist():
    text = (PROJECT / "docs" / "paper-map.md").read_text()
    for name in set(re.findall(r"`(tests/test_\w+\.py)`", text)):
        assert (PROJECT / name).exists(), name
    assert len(set(re.findall(r"`((?:eq|table|fig|lemma|algo|coro|sec|appendix):[\w:.-]+)`", text))) > 150
