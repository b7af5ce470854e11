"""The documentation site: sphinx-build -W docs runs/site"""

import importlib.util
import re
from pathlib import Path
from typing import Any

import adptnet

HERE = Path(__file__).parent
ROWS = HERE.parent / "results"  # of the reproduction; not part of a source distribution
HAS_REPORT = ROWS.is_dir() and all(importlib.util.find_spec(package) for package in ("tyro", "matplotlib"))

project = "adptnet"
author = "The adptnet developers"
version = release = adptnet.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
exclude_patterns = ["report/*", *([] if HAS_REPORT else ["report.md"])]
templates_path = ["_templates"]
html_theme = "furo"
html_title = "adptnet"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False

myst_heading_anchors = 3
default_role = "code"  # `names` in docstrings
napoleon_numpy_docstring = False
autosummary_generate = True
autosummary_imported_members = True
autodoc_member_order = "groupwise"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 100

KINDS = {"Tutorials": "tutorials", "How-to guides": "how-to", "Reference": "reference", "Explanation": "explanation"}


def contents() -> str:
    """The table of contents: the pages of each kind, then those at the top."""
    trees = {kind: sorted(HERE.glob(f"{folder}/*.md")) for kind, folder in KINDS.items()}
    trees["Project"] = [
        p for p in sorted(HERE.glob("*.md")) if p.stem not in ("index", *([] if HAS_REPORT else ["report"]))
    ]
    lines = [""]
    for caption, pages in trees.items():
        names = [str(page.relative_to(HERE).with_suffix("")) for page in pages]
        lines += ["```{toctree}", f":caption: {caption}", ":hidden:", "", *names, "```", ""] if names else []
    return "\n".join(lines)


def as_site(app: Any, page: str, source: list[str]) -> None:
    """The pages are read elsewhere as they are: here index.md has the others, and files of the project are no links."""
    source[0] = re.sub(
        r"\[([^\]]+)\]\((?:\.\./)+(?!how-to|reference|explanation|tutorials|\w+\.md)[^)]+\)", r"\1", source[0]
    )
    if page == "index":
        source[0] += contents()


def as_text(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text: what is a mark to reStructuredText is meant as it stands, but for `code`."""
    for number, line in enumerate(lines):
        parts = re.split(r"(`[^`]*`)", line)
        parts[::2] = [re.sub(r"([\\*|]|_(?!\w))", r"\\\1", part) for part in parts[::2]]
        lines[number] = "".join(parts)


def build_report(app: Any, exception: Exception | None) -> None:
    """Build the HTML report, a page of its own that report.md links to."""
    if exception is None and HAS_REPORT:
        from adptnet_lab.paper import report

        report.run(report.Report(rows=ROWS, output=Path(app.outdir, "report")))


def setup(app: Any) -> None:
    app.connect("source-read", as_site)
    app.connect("autodoc-process-docstring", as_text, priority=100)  # before the sections of a docstring are made
    app.connect("build-finished", build_report)
