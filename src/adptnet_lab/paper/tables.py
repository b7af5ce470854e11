"""Tables of the report: the paper's numbers and ours side by side, and any table as CSV."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from .recipe import Table

__all__ = ["format_cell", "make_paper_table", "merge_tables", "render_csv", "render_json"]


def format_cell(value: Any) -> str:
    """Return the text of a cell.

    Args:
        value: A number or text.
    """
    return f"{value:g}" if isinstance(value, float) else str(value)


def make_paper_table(numbers: Mapping[str, Any]) -> Table | None:
    """Return the paper's numbers, given as a table or as a mapping from names, as a table.

    Args:
        numbers: From the file of claims.
    """
    if not numbers:
        return None
    if "columns" in numbers:
        return Table(numbers["columns"], numbers["rows"])
    return Table(["", "the paper"], list(numbers.items()))


def merge_tables(paper: Table, ours: Table, keys: Sequence[str]) -> Table:
    """Return one table with the paper's numbers and ours in neighbouring columns.

    Args:
        paper: The paper's table.
        ours: Our table, with the same key columns.
        keys: The columns that identify a row.

    Returns:
        The keys, each shared column twice, and our further columns. A row that only one of the two has is kept.
    """
    shared = [column for column in paper.columns if column in ours.columns and column not in keys]
    further = [column for column in ours.columns if column not in paper.columns]
    by_key = [{_make_key(table, row, keys): row for row in table.rows} for table in (paper, ours)]
    lines: list[list[Any]] = []
    for key in dict.fromkeys([*by_key[0], *by_key[1]]):
        theirs, own = (_find_cells(table, rows.get(key)) for table, rows in zip((paper, ours), by_key, strict=True))
        cells = [cell for column in shared for cell in (theirs(column), own(column))]
        lines.append([*key, *cells, *(own(column) for column in further)])
    headings = [f"{column}, {whose}" for column in shared for whose in ("paper", "ours")]
    return Table([*keys, *headings, *further], lines)


def _make_key(table: Table, row: Sequence[Any], keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(format_cell(row[table.columns.index(key)]) for key in keys)


def _find_cells(table: Table, row: Sequence[Any] | None) -> Any:
    return lambda column: "" if row is None else row[table.columns.index(column)]


def render_json(tables: Mapping[str, Mapping[str, Table]]) -> str:
    """Return tables as JSON: by result and heading, each with its `columns` and `rows`.

    Args:
        tables: Tables by result and heading. Results without a table are left out.
    """
    content = {
        name: {
            heading: {"columns": table.columns, "rows": [list(map(_to_cell, row)) for row in table.rows]}
            for heading, table in some.items()
        }
        for name, some in tables.items()
        if some
    }
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _to_cell(value: Any) -> Any:
    return value if isinstance(value, int) else format_cell(value)


def render_csv(table: Table) -> str:
    """Return a table as CSV.

    Args:
        table: The table.
    """
    page = io.StringIO()
    writer = csv.writer(page, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows([format_cell(cell) for cell in row] for row in table.rows)
    return page.getvalue()
