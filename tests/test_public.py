"""The public names, the cost of importing, and the documentation."""

import importlib
import importlib.util
import operator
import pkgutil
import re
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path

import pytest

import adptnet
import adptnet_lab
from support.small_runs import run_program_in_process, start_process

PROJECT = Path(__file__).parents[1]

PUBLIC = [
    *("ADPTNet", "ADPTState", "Bidirectional", "CoupledADPTNet", "LinearADPTNet", "Recurrent", "SequenceModel"),
    *("Spec", "SpikingADPTNet", "Stack", "TaylorADPTNet", "TrainableBeta"),
    *("__version__", "adjoints", "analysis", "backends", "cells", "conjugates", "directions", "drive", "errors"),
    *("explain", "load", "nn", "optim"),
    *("presets", "projections", "retractions", "save", "solvers", "spectra", "verify"),
]


def modules():
    packages = [(package.__path__, f"{package.__name__}.") for package in (adptnet, adptnet_lab)]
    names = [name for path, prefix in packages for _, name, _ in pkgutil.walk_packages(path, prefix)]
    return [name for name in names if name != "adptnet.__main__" and ".peers." not in name]


def test_the_public_names_are_these():
    assert sorted(adptnet.__all__) == sorted(PUBLIC)
    assert all(hasattr(adptnet, name) for name in PUBLIC)


@pytest.mark.parametrize("name", modules())
def test_every_module_has_a_docstring_and_names_its_exports(name):
    if name.endswith(".triton"):
        pytest.importorskip("triton", reason="triton is not installed: pip install 'adptnet[triton]'")
    if ".hugging_face" in name:
        pytest.importorskip("transformers", reason="transformers is not installed: pip install 'adptnet[hf]'")
    if name.endswith(".torchrl"):
        pytest.importorskip("tensordict", reason="torchrl is not installed: pip install 'adptnet[rl]'")
    module = importlib.import_module(name)
    assert module.__doc__
    if hasattr(module, "__all__"):
        assert sorted(module.__all__) == sorted(set(module.__all__))
        assert all(hasattr(module, shown) for shown in module.__all__)


def test_importing_adptnet_imports_nothing_heavy():
    heavy = [
        "matplotlib",
        "triton",
        "jaxtyping",
        "beartype",
        "tyro",
        "rich",
        "safetensors",
        "scipy",
        "transformers",
        "pooch",
        "torch._dynamo",
    ]
    code = f"import sys, adptnet; print([m for m in {heavy!r} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_the_version_is_the_same_everywhere():
    assert f"## {adptnet.__version__}" in (PROJECT / "CHANGELOG.md").read_text()
    assert f"version: {adptnet.__version__}" in (PROJECT / "CITATION.cff").read_text()


def test_the_readme_of_a_distribution_has_absolute_links_only(monkeypatch):
    interface = types.ModuleType("hatchling.metadata.plugin.interface")  # hatchling need not be installed
    interface.MetadataHookInterface = object
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    for package in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    hook = load_file(PROJECT / "hatch_build.py")
    text = hook.make_links_absolute((PROJECT / "README.md").read_text(), "https://example.org/adptnet")
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert "https://example.org/adptnet/blob/main/SECURITY.md" in targets
    assert all(target.startswith("https://") for target in targets)
    assert all("/raw/main/" in target for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text))


def load_file(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (PROJECT / page).read_text(), re.MULTILINE | re.DOTALL)


CODE_IN = [
    *("how-to/choose", "how-to/pytorch", "how-to/analyze", "how-to/solve", "how-to/train", "how-to/export"),
    *("reference/baselines", "reference/tasks", "explanation/recurrence"),
]
PAGES = ["README.md", *(f"docs/{name}.md" for name in CODE_IN)]
if importlib.util.find_spec("scipy"):
    PAGES.append("docs/how-to/spiking.md")
if importlib.util.find_spec("transformers"):
    PAGES.append("docs/how-to/hugging-face.md")


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path):
    code = "\n".join(blocks(page))
    assert code
    process = start_process(run_program_in_process, code, tmp_path, tmp_path / "printed")
    process.join(100)
    process.kill()
    assert process.exitcode == 0, (tmp_path / "printed").read_text()


@pytest.mark.parametrize(
    "page", ["README.md", *sorted(str(p.relative_to(PROJECT)) for p in (PROJECT / "docs").rglob("*.md"))]
)
def test_links_between_pages_resolve(page):
    source = PROJECT / page
    prose = re.sub(r"^```.*?^```", "", source.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose):
        if "://" not in target:
            assert (source.parent / target).exists(), target


def test_the_paper_map_names_existing_objects():
    text = (PROJECT / "docs" / "reference" / "paper-map.md").read_text()
    for name in set(re.findall(r"`(test_\w+)`", text)):
        assert list((PROJECT / "tests").rglob(f"{name}.py")), name
    rows = re.findall(r"^\| ([^|]+) \|[^|]*\| ([^|]+) \|[^|]*\| ([^|]+) \|$", text, re.MULTILINE)
    labels = {label for label, _, _ in rows} - {"label", "---"}
    assert len(labels) >= 239  # the labels of the paper
    for _, code, _ in rows:
        for path in re.findall(r"`([\w.]+)`", code):
            found = operator.attrgetter(path)(adptnet) if hasattr(adptnet, path.split(".")[0]) else imported(path)
            assert found is not None, path


def test_the_paper_map_counts_its_own_lines():
    text = (PROJECT / "docs" / "reference" / "paper-map.md").read_text()
    columns = [re.split(r"(?<!\\)\|", line) for line in text.splitlines() if line.startswith("| ")]
    found = Counter(row[5].split()[0] for row in columns if len(row) == 7)
    told = {row[1].strip(): int(row[2]) for row in columns if len(row) == 4 and row[2].strip().isdecimal()}
    assert told == {name: found[name] for name in ("done", "partly", "background", "literature")}
    assert "planned" not in text


def imported(path: str):
    """Return an object by name from a module that `import adptnet` does not import, such as `tasks.WordProblem`."""
    return pkgutil.resolve_name(f"adptnet_lab.{path}")
