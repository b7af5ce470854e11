"""`adptnet report`: one page that shows what holds and what does not, with our numbers beside the paper's."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from adptnet._io.files import write_whole

from . import drawing, html, markdown
from .compare import Judged, judge, notice
from .dial import dial
from .recipe import Outcome, Scale, Table
from .registry import ReproductionError, find
from .rows import choose_shelf

__all__ = ["Entry", "Picture", "Report", "run"]


@dataclass(frozen=True)
class Report:
    """Write index.html (self-contained), index.md and the figures from the rows there are."""

    rows: Path | None = None
    """Folder of the rows. If not given, runs/paper where reproduce writes them, or, if that has none, results, the rows
    that the repository comes with."""
    scale: Scale | None = None
    """Rows of this scale; for each result the largest that is complete if not given."""
    output: Path = Path("runs/report")
    """Folder of the page."""


class Picture(NamedTuple):
    """A figure, twice."""

    caption: str
    stem: str  # of its file
    inline: str
    standalone: str


class Entry(NamedTuple):
    """All that the page says of one result."""

    judged: Judged
    pictures: Sequence[Picture]
    ours: Table | None
    paper: Table | None


def run(options: Report) -> Counter[Outcome]:
    """Writes the pages and returns how many claims have each verdict."""
    shelf = choose_shelf(options.rows)
    notice(shelf)
    entries = [_entry(judge(result, shelf, options.scale)) for result in find(())]
    counts = Counter(verdict.outcome for entry in entries for _, verdict in entry.judged.verdicts)
    pages = {f"figures/{picture.stem}.svg": picture.standalone for entry in entries for picture in entry.pictures}
    pages["index.html"] = html.page(entries, counts, dial([entry.judged for entry in entries]))
    pages["index.md"] = markdown.page(entries, counts)
    try:
        (options.output / "figures").mkdir(parents=True, exist_ok=True)
        for name, text in pages.items():
            write_whole(options.output / name, text.encode())
    except OSError as error:
        raise ReproductionError(
            f"the report cannot be written to {options.output}: {error.strerror}. Choose another folder by --output."
        ) from None
    print(", ".join(f"{outcome}: {counts[outcome]}" for outcome in Outcome))
    print(f"{options.output / 'index.html'}, {options.output / 'index.md'}")
    return counts


def _entry(judged: Judged) -> Entry:
    recipe = judged.result.recipe
    pictures = []
    ours = None
    if judged.scale is not None and not judged.spoilt:
        for number, (caption, draw) in enumerate(recipe.figures.items(), 1):
            stem = f"{judged.result.name.replace(':', '-')}-{number}"
            text = drawing.svg(draw(judged.rows), stem)
            pictures.append(Picture(caption, stem, drawing.inline(text), drawing.standalone(text)))
        ours = recipe.table(judged.rows) if recipe.table else None
    return Entry(judged, pictures, ours, _as_table(judged.result.numbers))


def _as_table(numbers: Any) -> Table | None:
    """The paper's numbers, which are a table or a few that it names."""
    if not numbers:
        return None
    if "columns" in numbers:
        return Table(numbers["columns"], numbers["rows"])
    return Table(["", "the paper"], list(numbers.items()))
