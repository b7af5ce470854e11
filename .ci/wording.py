"""Check the wording of code and documentation against the patterns in wording.txt; prints each place, exits with 1.

Docstrings must open with a verb or a noun phrase, not with a relative clause or a genitive fragment.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".py", ".md", ".cpp", ".h"}
LEFT_OUT = ("results/", "docs/report/", ".ci/wording")  # measured rows, generated pages, and this check itself
OPENING = re.compile(r"(What|Of|Those|That of|As|Which|Whose|Where) ")


def patterns() -> list[tuple[re.Pattern[str], str]]:
    """Return the patterns with the terms to use instead."""
    lines = (ROOT / ".ci" / "wording.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("=>") for line in lines if line.strip() and not line.startswith("#"))
    return [(re.compile(pattern.strip(), re.IGNORECASE), instead.strip()) for pattern, instead in pairs]


def files() -> list[Path]:
    """Return the tracked and new files whose wording is checked."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    ).stdout.splitlines()
    paths = [ROOT / name for name in listed if not name.startswith(LEFT_OUT)]
    return [path for path in paths if path.suffix in SUFFIXES and path.is_file()]


def docstring_faults(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the opening of each docstring that does not open with a verb or a noun phrase."""
    for node in ast.walk(ast.parse(text)):  # also the strings that document the fields of a class
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstring = node.value.value.strip()
            if OPENING.match(docstring):
                yield node.lineno, docstring.splitlines()[0][:60]


def main() -> int:
    rules, count = patterns(), 0
    for path in files():
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT)
        for number, line in enumerate(text.splitlines(), 1):
            for pattern, instead in rules:
                if found := pattern.search(line):
                    print(f"{name}:{number}: '{found[0]}': write: {instead}")
                    count += 1
        if path.suffix == ".py":
            for number, opening in docstring_faults(text):
                print(f"{name}:{number}: docstring opens with '{opening}': open with a verb or a noun phrase")
                count += 1
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
