"""
linear on the CPU: the library's product, for a few numbers of rows that were tested to agree.

The order of a row's sums in the library depends on the number of rows and threads, on the addresses
of what it reads and writes, modulo the width of a vector, and maybe on the row's place among the
others. So rows are cut into tiles of a few sizes, the last one filled up with zeros, and each tile
begins at an aligned address. Before a size is used for a weight, it is tested: rows must have the
same bits at any place, and in tiles of all sizes. If they differ by place, each row is multiplied
alone, always with the same shape and alignment.
"""

from __future__ import annotations

from collections.abc import Iterator

import structlog
import torch
from torch import Tensor

_SMALLEST = 16
"""
Rows of the smallest tile. Fewer would cost less, but libraries use other code for fewer rows, and
larger tiles do not agree with it.
"""

_LARGER = (64, 256)
"""Rows of larger tiles, used if they agree with the smallest: they are faster per row."""

_MOST_ELEMENTS = 1 << 24
"""Most elements of a tile's result; larger ones gain nothing."""

_ALONE = 1

_ALIGNMENT = 64
"""Bytes of the widest vector. The framework allocates tensors at multiples of it."""

_Key = tuple[int, int, torch.dtype, int, int]
"""Columns, width and type of a weight, its address modulo the alignment, and number of threads."""

_log = structlog.get_logger(__name__)
_smallest: dict[_Key, int] = {}
_agrees: dict[tuple[_Key, int], bool] = {}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """
    Multiply; arguments are as in the package's `linear`, unchecked.

    A product is rounded to the type before it is added to a residual.
    """
    num_rows = x.shape[0]
    out = torch.empty((num_rows, weight.shape[0]), dtype=x.dtype)
    x = x.contiguous()
    first = 0
    for size in _cut(weight, num_rows):
        rows, part = x[first : first + size], out[first : first + size]
        if len(rows) == size and _is_aligned(rows) and _is_aligned(part):
            torch.mm(rows, weight.t(), out=part)
        else:
            part.copy_(_product(rows, weight, size)[: len(part)])
        first += size
    if bias is not None:
        out += bias
    return out if residual is None else residual.add_(out)


def _cut(weight: Tensor, num_rows: int) -> Iterator[int]:
    """Yield sizes of tiles that hold so many rows; the last may have room to spare."""
    num_columns, width = weight.shape
    # How a product is shared among threads may change its bits, so the tests of a weight are made
    # again for each number of threads.
    place = weight.data_ptr() % _ALIGNMENT
    key = num_columns, width, weight.dtype, place, torch.get_num_threads()
    smallest = _smallest_tile(key, weight)
    left = num_rows
    for size in reversed(_LARGER):
        while left >= size and smallest != _ALONE and _larger_tile_agrees(key, weight, size):
            yield size
            left -= size
    while left > 0:
        yield smallest
        left -= smallest


def _product(rows: Tensor, weight: Tensor, size: int) -> Tensor:
    """Multiply up to `size` rows in an aligned tile of `size`: ``[size, N]``, aligned as well."""
    tile = torch.empty((size, rows.shape[1]), dtype=rows.dtype)
    tile[: len(rows)] = rows
    tile[len(rows) :] = 0
    return torch.mm(tile, weight.t())


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % _ALIGNMENT == 0


def _smallest_tile(key: _Key, weight: Tensor) -> int:
    """Return the smallest tile in which a row has the same bits at any place."""
    size = _smallest.get(key)
    if size is None:
        size = _smallest[key] = _SMALLEST if _places_agree(weight) else _ALONE
        if size == _ALONE:
            _log.warning(
                "rows_multiplied_alone",
                reason="the library rounds a row by its place among others",
                shape=list(weight.shape),
                dtype=str(weight.dtype),
                num_threads=key[-1],
            )
    return size


def _places_agree(weight: Tensor) -> bool:
    rows = _samples(weight, _SMALLEST)
    expected = _product(rows, weight, _SMALLEST)
    turned = (
        _product(rows.roll(by, 0), weight, _SMALLEST).roll(-by, 0) for by in range(1, _SMALLEST)
    )
    if not all(_same_bits(expected, found) for found in turned):
        return False
    return _same_bits(expected[:1], _product(rows[:1], weight, _SMALLEST)[:1])


def _larger_tile_agrees(key: _Key, weight: Tensor, size: int) -> bool:
    """Tell whether tiles of `size` rows give the same bits as the smallest ones."""
    found = _agrees.get((key, size))
    if found is None:
        found = size * weight.shape[0] <= _MOST_ELEMENTS
        if found:
            rows = _samples(weight, size)
            parts = [_product(part, weight, _SMALLEST) for part in torch.split(rows, _SMALLEST)]
            found = _same_bits(torch.cat(parts), _product(rows, weight, size))
        _agrees[key, size] = found
    return found


def _samples(weight: Tensor, num_rows: int) -> Tensor:
    """
    Return rows for tests of products, whose results show in which order they were summed.

    Of each row's product with one column nothing but rounding errors is left: the numbers stand in
    pairs with opposite products. Results of other rows round to the same 16 bits in nearly every
    order.
    """
    num_columns, width = weight.shape
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.zeros((num_rows, width), dtype=weight.dtype)
    largest = weight.abs().max().float().clamp(min=2.0**-14)
    scale = torch.exp2(torch.floor(10 - torch.log2(largest)))  # errors must not vanish in float16
    for row in range(num_rows if width > 1 else 0):
        column = weight[row % num_columns] * scale
        first, second = torch.randperm(width, generator=generator)[: width // 2 * 2].view(2, -1)
        rows[row, first], rows[row, second] = column[second], -column[first]
    return rows


def _same_bits(expected: Tensor, found: Tensor) -> bool:
    kind = torch.int32 if expected.dtype.itemsize == 4 else torch.int16
    return torch.equal(expected.view(kind), found.contiguous().view(kind))
