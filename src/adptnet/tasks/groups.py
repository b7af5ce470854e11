"""Finite groups as product tables."""

import functools
import itertools
import re

import torch
from torch import Tensor

from ..errors import InputError

__all__ = ["product_table"]

_LARGEST = {"S": 6, "A": 6, "Z": 2048}


def product_table(name: str) -> Tensor:
    """The product of every pair of elements: table[p, q] is p·q, (size, size) int64.

    Args:
        name: "S3", "S5" (all permutations), "A5" (the even ones), "Z6" (addition modulo 6). Permutations are
            numbered in lexicographic order, so 0 is the identity, and (p·q)[i] = p[q[i]].
    """
    return _table(name).clone()


@functools.cache
def _table(name: str) -> Tensor:
    match = re.fullmatch(r"([SAZ])([1-9]\d*)", str(name))
    if match is None or int(match[2]) > _LARGEST[match[1]]:
        largest = ", ".join(f"{kind}{n}" for kind, n in _LARGEST.items())
        raise InputError(f"group {name!r} is unknown. Groups are S3, A5, Z6 and the like, up to {largest}.")
    kind, n = match[1], int(match[2])
    if kind == "Z":
        number = torch.arange(n)
        return (number.unsqueeze(1) + number) % n
    elements = [p for p in itertools.permutations(range(n)) if kind == "S" or _is_even(p)]
    permutations = torch.tensor(elements)
    products = permutations[:, permutations]  # [p, q, i] = p[q[i]]
    place = n ** torch.arange(n - 1, -1, -1)  # digits of a number that sorts as the permutations do
    return torch.searchsorted((permutations * place).sum(-1), (products * place).sum(-1))


def _is_even(permutation: tuple[int, ...]) -> bool:
    return sum(a > b for a, b in itertools.combinations(permutation, 2)) % 2 == 0
