"""Products of a tile of rows with all columns of a weight, by the library, in several ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes of the widest vector. The framework allocates tensors at multiples of it."""

_COLUMNS = 256
"""
Columns of a tile. For fewer, libraries take other code than for all columns of a weight, which then
does not agree.
"""

Product = Callable[[Tensor, Tensor, Tensor], object]
"""Writes the product of aligned rows and a weight to an aligned result."""


def whole(rows: Tensor, weight: Tensor, out: Tensor) -> None:
    """Multiply at once, in all threads."""
    torch.mm(rows, weight.t(), out=out)


def whole_in_one_thread(rows: Tensor, weight: Tensor, out: Tensor) -> None:
    """Multiply at once."""
    with in_one_thread():
        torch.mm(rows, weight.t(), out=out)


def by_columns(rows: Tensor, weight: Tensor, out: Tensor) -> None:
    """
    Multiply by tiles of columns in one thread: a column's arithmetic does not depend on the number
    of columns or threads.
    """
    with in_one_thread():
        for first in range(0, len(weight), _COLUMNS):
            part = weight[first : first + _COLUMNS]
            if len(part) < _COLUMNS or part.data_ptr() % ALIGNMENT:
                part = tile_of(part, _COLUMNS)
            found = torch.mm(rows, part.t())
            out[:, first : first + _COLUMNS] = found[:, : len(weight) - first]


def tile_of(rows: Tensor, size: int) -> Tensor:
    """Return a copy of rows, aligned and filled up with zeros to `size` of them."""
    tile = torch.empty((size, rows.shape[1]), dtype=rows.dtype)
    tile[: len(rows)] = rows
    tile[len(rows) :] = 0
    return tile


@contextmanager
def in_one_thread() -> Iterator[None]:
    """Let the library use no other thread than this one."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
