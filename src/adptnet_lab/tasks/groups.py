"""Finite groups as product tables."""

import functools
import itertools
import re

import torch
from torch import Tensor

from adptnet.errors import InputError

__all__ = ["format_product_table", "product_table"]

_LARGEST = {"S": 6, "A": 6, "Z": 2048, "D": 1024, "Q": 8}
_LARGEST_SIZE = 2048
_LARGEST_GIVEN = 720  # elements of a user-provided table, whose check takes n³ operations


def product_table(name: str) -> Tensor:
    """Return the multiplication table of a finite group: table[p, q] is p·q, (size, size) int64.

    Element 0 is the identity. Permutations are numbered in lexicographic order, and (p·q)[i] = p[q[i]].

    Args:
        name: "S3", "S5" (all permutations), "A5" (the even ones), "Z6" (addition modulo 6), "D4" (the 8 symmetries of
            a square), "Q8" (quaternions), direct products of those ("S3xZ2"), or a table of your own, row by row:
            "0 1; 1 0", as `format_product_table(table)` writes it.

    Raises:
        InputError: The name is unknown, the group is too large, or the table is not a group.
    """
    return shared_product_table(name).clone()


def format_product_table(table: Tensor) -> str:
    """Return a product table as text, which `product_table` and `WordProblem` accept as the name of a group.

    Args:
        table: (size, size) integers.

    Raises:
        InputError: The table is not two-dimensional, or holds floating-point numbers.
    """
    rows = torch.as_tensor(table)
    if rows.dim() != 2 or rows.is_floating_point():
        raise InputError(f"a product table is (size, size) integers; got {rows.dtype} {tuple(rows.shape)}.")
    return "; ".join(" ".join(str(int(value)) for value in row) for row in rows)


@functools.lru_cache(maxsize=32)
def shared_product_table(name: str) -> Tensor:
    """Return the cached table of `product_table`. Callers share it and must not write to it.

    Args:
        name: As for `product_table`.
    """
    text = str(name)
    if re.fullmatch(r"[\d\s;]+", text) and text.strip():
        return _parse_table(text)
    factors = [_make_factor(part, text) for part in text.split("x")]
    table = factors[0]
    for factor in factors[1:]:
        if len(table) * len(factor) > _LARGEST_SIZE:
            raise InputError(
                f"group {text!r} has more than {_LARGEST_SIZE} elements. Take smaller factors, e.g. S3xZ2."
            )
        table = _direct_product(table, factor)
    return table


def _make_factor(name: str, whole: str) -> Tensor:
    """Return the table of one factor of the group called `whole`."""
    match = re.fullmatch(r"([SAZDQ])([1-9]\d*)", name)
    if match is None or int(match[2]) > _LARGEST[match[1]] or (match[1] == "Q" and match[2] != "8"):
        largest = ", ".join(f"{kind}{n}" for kind, n in _LARGEST.items())
        raise InputError(
            f"group {whole!r} is unknown. Groups are S3, A5, Z6, D4, Q8 and the like, up to {largest}, products such "
            "as S3xZ2, or a table of your own, row by row: '0 1; 1 0'."
        )
    kind, n = match[1], int(match[2])
    if kind == "Q":
        return _quaternions()
    if kind == "Z":
        number = torch.arange(n)
        return (number.unsqueeze(1) + number) % n
    return _dihedral(n) if kind == "D" else _permutations(n, even=kind == "A")


def _permutations(n: int, *, even: bool) -> Tensor:
    elements = [p for p in itertools.permutations(range(n)) if not even or _is_even(p)]
    permutations = torch.tensor(elements)
    products = permutations[:, permutations]  # [p, q, i] = p[q[i]]
    place = n ** torch.arange(n - 1, -1, -1)  # place values of a base-n number that sorts like the permutations
    return torch.searchsorted((permutations * place).sum(-1), (products * place).sum(-1))


def _is_even(permutation: tuple[int, ...]) -> bool:
    return sum(a > b for a, b in itertools.combinations(permutation, 2)) % 2 == 0


def _dihedral(n: int) -> Tensor:
    """Return the table of the dihedral group: rotations r^i at i, reflections r^i m at n + i, with m r = r⁻¹ m."""
    element = torch.arange(2 * n)
    rotation, reflected = element % n, element // n
    sign = 1 - 2 * reflected
    product = (rotation.unsqueeze(1) + sign.unsqueeze(1) * rotation) % n
    return product + n * ((reflected.unsqueeze(1) + reflected) % 2)


def _quaternions() -> Tensor:
    """Return the table of the quaternion group: 1, i, j, k at 0 to 3 and their negatives at 4 to 7."""
    units = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]])
    negative = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 1, 1]])  # ij = k, ji = -k, ii = -1
    element = torch.arange(8)
    unit, sign = element % 4, element // 4
    p, q = unit.unsqueeze(1), unit
    return units[p, q] + 4 * ((negative[p, q] + sign.unsqueeze(1) + sign) % 2)


def _direct_product(left: Tensor, right: Tensor) -> Tensor:
    """Return the table of the pairs (p, q), numbered p · len(right) + q."""
    size = len(left) * len(right)
    table = left[:, None, :, None] * len(right) + right[None, :, None, :]
    return table.reshape(size, size)


def _parse_table(text: str) -> Tensor:
    """Return the table that `text` spells row by row, after checking that it is a group."""
    rows = [[int(value) for value in row.split()] for row in text.strip().strip(";").split(";")]
    size = len(rows)
    if any(len(row) != size for row in rows) or size > _LARGEST_GIVEN:
        raise InputError(
            f"a product table is square, of at most {_LARGEST_GIVEN} elements; got {size} rows of "
            f"{sorted({len(row) for row in rows})} numbers. Separate rows by semicolons: '0 1; 1 0'."
        )
    table = torch.tensor(rows)
    elements = torch.arange(size)
    reason = None
    if int(table.max()) >= size:
        reason = f"{int(table.max())} is not an element: they are numbered 0 to {size - 1}"
    elif not torch.equal(table[0], elements) or not torch.equal(table[:, 0], elements):
        reason = "element 0 must be the identity: the first row and the first column count up from 0"
    elif not torch.equal(table.sort(-1).values, elements.expand(size, size)):
        row = int((table.sort(-1).values != elements).any(-1).nonzero()[0, 0])
        reason = f"row {row} lacks elements, so {row} has no inverse"
    elif (bad := _find_non_associative(table)) is not None:
        p, q, r = bad
        reason = f"({p}·{q})·{r} is not {p}·({q}·{r})"
    if reason is not None:
        raise InputError(f"the product table is not a group: {reason}.")
    return table


def _find_non_associative(table: Tensor) -> tuple[int, int, int] | None:
    """Return elements p, q, r with (p·q)·r ≠ p·(q·r), or None if the product is associative."""
    for p in range(len(table)):
        wrong = (table[table[p]] != table[p][table]).nonzero()
        if len(wrong):
            return p, int(wrong[0, 0]), int(wrong[0, 1])
    return None
