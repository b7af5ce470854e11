"""`adptnet report`: a page with every claim, its verdict, and our numbers beside the paper's."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from adptnet._io.files import write_atomic

from .compare import JudgedResult, judge, print_rows_folder
from .dial import collect_dial_data
from .html import render_html
from .markdown import render_markdown
from .recipe import Outcome, Scale, Table
from .registry import ReproductionError, find_results
from .rows import open_row_store
from .svg import add_background, make_inline, render_svg

__all__ = ["Report", "ReportEntry", "ReportFigure", "run"]


@dataclass(frozen=True)
class Report:
    """Write index.html (self-contained), index.md and the figures from the stored rows."""

    rows: Path | None = None
    """Folder of the rows. Default: runs/paper, where reproduce writes them; if it has none, the rows in results/, which
    are committed to the repository."""
    scale: Scale | None = None
    """Scale of the rows. Default: for each result the largest scale that is complete."""
    output: Path = Path("runs/report")
    """Folder of the report."""


class ReportFigure(NamedTuple):
    """A figure, as an element of the HTML page and as a file."""

    caption: str
    stem: str  # of its file
    inline: str
    standalone: str


class ReportEntry(NamedTuple):
    """The part of the report on one result."""

    judged: JudgedResult
    figures: Sequence[ReportFigure]
    our_table: Table | None
    paper_table: Table | None


def run(options: Report) -> Counter[Outcome]:
    """Write the report and return the number of claims with each outcome.

    Args:
        options: Folders and scale.

    Raises:
        ReproductionError: The folder of the report cannot be written to.
    """
    store = open_row_store(options.rows)
    print_rows_folder(store)
    entries = [_make_entry(judge(result, store, options.scale)) for result in find_results(())]
    counts = Counter(verdict.outcome for entry in entries for _, verdict in entry.judged.verdicts)
    files = {f"figures/{figure.stem}.svg": figure.standalone for entry in entries for figure in entry.figures}
    files["index.html"] = render_html(entries, counts, collect_dial_data([entry.judged for entry in entries]))
    files["index.md"] = render_markdown(entries, counts)
    try:
        (options.output / "figures").mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_atomic(options.output / name, text.encode())
    except OSError as error:
        raise ReproductionError(
            f"the report cannot be written to {options.output}: {error.strerror}. Choose another folder with --output."
        ) from None
    print(", ".join(f"{outcome}: {counts[outcome]}" for outcome in Outcome))
    print(f"{options.output / 'index.html'}, {options.output / 'index.md'}")
    return counts


def _make_entry(judged: JudgedResult) -> ReportEntry:
    recipe = judged.result.recipe
    figures = []
    our_table = None
    if judged.scale is not None and not judged.problem:
        for number, (caption, draw) in enumerate(recipe.figures.items(), 1):
            stem = f"{judged.result.name.replace(':', '-')}-{number}"
            svg = render_svg(draw(judged.rows), stem)
            figures.append(ReportFigure(caption, stem, make_inline(svg), add_background(svg)))
        our_table = recipe.table(judged.rows) if recipe.table else None
    return ReportEntry(judged, figures, our_table, _make_table(judged.result.numbers))


def _make_table(numbers: Any) -> Table | None:
    """Return the paper's numbers, given as a table or as a mapping from names, as a table."""
    if not numbers:
        return None
    if "columns" in numbers:
        return Table(numbers["columns"], numbers["rows"])
    return Table(["", "the paper"], list(numbers.items()))
