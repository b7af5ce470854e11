"""`adptnet report`: a page with the abstract's claims, every verdict, and our numbers beside the paper's."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from adptnet._io.files import write_atomic

from .compare import (
    JudgedHeadline,
    JudgedResult,
    Tally,
    describe_tally,
    judge,
    judge_headlines,
    print_rows_folder,
    render_verdicts,
    tally_verdicts,
)
from .dial import collect_dial_data
from .html import render_html
from .markdown import render_markdown
from .recipe import Scale, Table
from .registry import ReproductionError, find_results
from .rows import RowStore, open_row_store
from .svg import add_background, make_inline, render_svg
from .tables import make_paper_table, merge_tables, render_csv, render_json

__all__ = ["Report", "ReportContent", "ReportEntry", "ReportFigure", "run"]


@dataclass(frozen=True)
class Report:
    """Write index.html (self-contained), index.md, the figures, and every table as CSV and JSON."""

    rows: Path | None = None
    """Folder of the rows. Default: runs/paper, where reproduce writes them; if it has none, the rows in results/, which
    are committed to the repository."""
    scale: Scale | None = None
    """Scale of the rows. Default: for each claim the largest scale at which the points it needs have been run."""
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
    tables: Mapping[str, Table]  # by heading


class ReportContent(NamedTuple):
    """Everything that the pages show."""

    headlines: Sequence[JudgedHeadline]
    entries: Sequence[ReportEntry]
    tally: Tally


def run(options: Report) -> Tally:
    """Write the report and return the number of claims with each outcome, by group.

    Args:
        options: Folders and scale.

    Raises:
        ReproductionError: The folder of the report cannot be written to.
    """
    store = open_row_store(options.rows)
    print_rows_folder(store)
    judged = [judge(result, store, options.scale) for result in find_results(())]
    entries = [_make_entry(one, store) for one in judged]
    content = ReportContent(judge_headlines(judged), entries, tally_verdicts(judged))
    files = {f"figures/{figure.stem}.svg": figure.standalone for entry in entries for figure in entry.figures}
    for entry in entries:
        for heading, table in entry.tables.items():
            files[f"tables/{_make_stem(entry.judged.result.name)}-{_make_stem(heading)}.csv"] = render_csv(table)
    files["tables.json"] = render_json({entry.judged.result.name: entry.tables for entry in entries})
    files["index.html"] = render_html(content, collect_dial_data(judged))
    files["index.md"] = render_markdown(content)
    files["verdicts.csv"] = render_verdicts(judged, "csv")
    files["verdicts.json"] = render_verdicts(judged, "json")
    try:
        for folder in ("figures", "tables"):
            (options.output / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_atomic(options.output / name, text.encode())
    except OSError as error:
        raise ReproductionError(
            f"the report cannot be written to {options.output}: {error.strerror}. Choose another folder with --output."
        ) from None
    for line in describe_tally(content.tally):
        print(line)
    print(f"{options.output / 'index.html'}, {options.output / 'index.md'}")
    return content.tally


def _make_stem(text: str) -> str:
    """Return a text as part of a file name."""
    return re.sub(r"[^\w-]+", "-", text.replace("'", "")).strip("-")


def _make_entry(judged: JudgedResult, store: RowStore) -> ReportEntry:
    recipe = judged.result.recipe
    figures = []
    if judged.scale is not None and not judged.problem:
        for number, (caption, draw) in enumerate(recipe.figures.items(), 1):
            stem = f"{judged.result.name.replace(':', '-')}-{number}"
            svg = render_svg(draw(judged.rows), stem)
            figures.append(ReportFigure(caption, stem, make_inline(svg), add_background(svg)))
    return ReportEntry(judged, figures, _make_tables(judged, store))


def _make_tables(judged: JudgedResult, store: RowStore) -> dict[str, Table]:
    """Return the paper's table and ours: side by side where they have the same rows and ours are of the same scale."""
    recipe, numbers = judged.result.recipe, judged.result.numbers
    paper = make_paper_table(numbers)
    tables: dict[str, Table] = {}
    keys = numbers.get("keys")
    ours = None
    if recipe.table and judged.scale is not None and not judged.problem:
        ours = recipe.table(judged.rows)
    is_at_size = judged.scale == "paper" and not judged.reduction
    at_size = ours if is_at_size else None
    if at_size is None and keys and recipe.table and judged.scale != "paper":
        partial = store.read_rows(judged.result, "paper").rows
        at_size = recipe.table(partial) if partial else None
    if paper is not None and keys and at_size is not None:
        tables["the paper's numbers and ours at its scale"] = merge_tables(paper, at_size, keys)
    else:
        if paper is not None:
            tables["numbers of the paper"] = paper
        if at_size is not None:
            tables["our numbers at the paper's scale"] = at_size
    if ours is not None and not is_at_size:
        tables[f"our numbers at reduced scale ({judged.size})"] = ours
    return tables
