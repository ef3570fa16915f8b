"""
linear on the CPU: the library's product, of few numbers of rows that were seen to agree.

The library orders a row's sums by the number of rows, and may by a row's place among them. Rows are
cut into tiles of a few sizes, the last one filled up with zeros. Before a size is used for a weight
of some shape, it is tried: rows must have the same bits at any place, and in tiles of all sizes.
"""

from __future__ import annotations

from collections.abc import Iterator

import structlog
import torch
from torch import Tensor
from torch.nn import functional

_SMALLEST = 16
"""
Rows of a tile that few rows get. Fewer would cost less, but libraries take other code for fewer, in
which larger tiles do not agree.
"""

_LARGER = (64, 256)
"""Rows of a tile, where they agree with the smallest: the library is faster at more rows."""

_MOST_ELEMENTS = 1 << 24
"""Of a tile's result: larger ones gain nothing."""

_ALONE = 1

_Key = tuple[int, int, torch.dtype, int]

_log = structlog.get_logger(__name__)
_smallest: dict[_Key, int] = {}
_agrees: dict[tuple[_Key, int], bool] = {}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """
    Arguments as in the package's `linear`, unchecked.

    A sum that is added to a residual is rounded to the type before.
    """
    num_rows = x.shape[0]
    out = torch.empty((num_rows, weight.shape[0]), dtype=x.dtype)
    x = x.contiguous()
    first = 0
    for size in _cut(weight, num_rows):
        _product(x[first : first + size], weight, out[first : first + size], size)
        first += size
    if bias is not None:
        out += bias
    return out if residual is None else residual.add_(out)


def _cut(weight: Tensor, num_rows: int) -> Iterator[int]:
    """Sizes of tiles that hold so many rows, the last with room to spare."""
    num_columns, width = weight.shape
    # How many threads share a product may change its sums, so each number is tried.
    key = num_columns, width, weight.dtype, torch.get_num_threads()
    smallest = _smallest_tile(key, weight)
    left = num_rows
    for size in reversed(_LARGER):
        while left >= size and smallest != _ALONE and _larger_tile_agrees(key, weight, size):
            yield size
            left -= size
    while left > 0:
        yield smallest
        left -= smallest


def _product(rows: Tensor, weight: Tensor, out: Tensor, size: int) -> None:
    """Multiply up to `size` rows in a tile of `size`."""
    num_rows = rows.shape[0]
    if num_rows == size:
        torch.mm(rows, weight.t(), out=out)
    else:
        filled = functional.pad(rows, (0, 0, 0, size - num_rows))
        out.copy_(torch.mm(filled, weight.t())[:num_rows])


def _smallest_tile(key: _Key, weight: Tensor) -> int:
    """Rows of the tile of which rows have the same bits at any place and beside any others."""
    size = _smallest.get(key)
    if size is None:
        size = _smallest[key] = _SMALLEST if _places_agree(weight) else _ALONE
        if size == _ALONE:
            _log.warning(
                "rows_multiplied_alone",
                reason="the library rounds a row by its place among others",
                shape=list(weight.shape),
                dtype=str(weight.dtype),
                num_threads=key[3],
            )
    return size


def _places_agree(weight: Tensor) -> bool:
    rows = _samples(weight, _SMALLEST)
    expected = torch.mm(rows, weight.t())
    turned = (
        torch.mm(rows.roll(by, 0).contiguous(), weight.t()).roll(-by, 0)
        for by in range(1, _SMALLEST)
    )
    if not all(_same_bits(expected, found) for found in turned):
        return False
    rows[1:] = 0
    return _same_bits(expected[:1], torch.mm(rows, weight.t())[:1])


def _larger_tile_agrees(key: _Key, weight: Tensor, size: int) -> bool:
    """Whether tiles of `size` rows give the bits of the smallest ones."""
    found = _agrees.get((key, size))
    if found is None:
        found = size * weight.shape[0] <= _MOST_ELEMENTS
        if found:
            rows = _samples(weight, size)
            parts = [torch.mm(part, weight.t()) for part in torch.split(rows, _SMALLEST)]
            found = _same_bits(torch.cat(parts), torch.mm(rows, weight.t()))
        _agrees[key, size] = found
    return found


def _samples(weight: Tensor, num_rows: int) -> Tensor:
    """Rows to try products with: sums in another order end in other bits."""
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn((num_rows, weight.shape[1]), generator=generator).to(weight.dtype)


def _same_bits(expected: Tensor, found: Tensor) -> bool:
    kind = torch.int32 if expected.dtype.itemsize == 4 else torch.int16
    return torch.equal(expected.view(kind), found.contiguous().view(kind))
