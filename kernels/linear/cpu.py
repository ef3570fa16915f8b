"""
linear on the CPU: the library's product, for a few shapes that were tested to agree.

The order of a number's sum in the library depends on the numbers of rows, columns and threads, on
the addresses of what it reads and writes, modulo the width of a vector, and maybe on the number's
place among the others. So one product is the measure of all: a tile of few rows, filled up with
zeros, by tiles of columns, filled up too, at aligned addresses, in one thread (`tiles.by_columns`).
Rows are cut into tiles of a few sizes, and before a size is used for a weight, products of all
columns at once are tested: they must have the bits of the measure, where places do not matter. If
they do for rows, each row is multiplied alone.

Chunks are multiplied apart, in float32, from copies that hold nothing but the chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

import structlog
import torch
from torch import Tensor

from kernels.linear.reference import tree_sum
from kernels.linear.tiles import ALIGNMENT, Product, by_columns, tile_of, whole, whole_in_one_thread

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

_TURNS = (1, 37)
"""Columns by which a weight is turned to see whether their places matter."""

_Key = tuple[int, int, torch.dtype, int, int]
"""Columns, width and type of a weight, its address modulo the alignment, and number of threads."""

_log = structlog.get_logger(__name__)
_smallest: dict[_Key, int] = {}
_agreeing: dict[tuple[_Key, int], Product | None] = {}


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    num_chunks: int = 1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """
    Multiply; arguments are as in the package's `linear`, unchecked.

    A product of one chunk in the type of `x` is rounded to it before bias and residual are added.
    """
    kind = dtype or x.dtype
    if num_chunks == 1 and kind == x.dtype:
        out = _multiply(x, weight)
        if bias is not None:
            out += bias
        return out if residual is None else residual.add_(out)
    chunks = zip(x.chunk(num_chunks, dim=1), weight.chunk(num_chunks, dim=1), strict=True)
    total = tree_sum([_multiply(_wide(rows), _wide(columns)) for rows, columns in chunks])
    if bias is not None:
        total += bias
    if residual is None:
        return total.to(kind)
    return residual.copy_(total.add_(residual))


def _wide(part: Tensor) -> Tensor:
    return part.float().contiguous()


def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    num_rows = x.shape[0]
    out = torch.empty((num_rows, weight.shape[0]), dtype=x.dtype)
    x = x.contiguous()
    first = 0
    for size, product in _cut(weight, num_rows):
        rows, part = x[first : first + size], out[first : first + size]
        if len(rows) == size and _is_aligned(rows) and _is_aligned(part):
            product(rows, weight, part)
        else:
            part.copy_(_filled(product, rows, weight, size)[: len(part)])
        first += size
    return out


def _cut(weight: Tensor, num_rows: int) -> Iterator[tuple[int, Product]]:
    """
    Yield sizes of tiles that hold so many rows, and their products; the last may have room to
    spare.
    """
    num_columns, width = weight.shape
    # How a product is shared among threads may change its bits, so the tests of a weight are made
    # again for each number of threads.
    place = weight.data_ptr() % ALIGNMENT
    key = num_columns, width, weight.dtype, place, torch.get_num_threads()
    smallest = _smallest_tile(key, weight)
    left = num_rows
    for size in reversed(_LARGER):
        while left >= size and smallest != _ALONE:
            product = _agreeing_product(key, weight, size)
            if product is None:
                break
            yield size, product
            left -= size
    while left > 0:
        yield smallest, _agreeing_product(key, weight, smallest) or by_columns
        left -= smallest


def _filled(product: Product, rows: Tensor, weight: Tensor, size: int) -> Tensor:
    """Multiply up to `size` rows in an aligned tile of `size`: ``[size, N]``, aligned as well."""
    out = torch.empty((size, weight.shape[0]), dtype=rows.dtype)
    product(tile_of(rows, size), weight, out)
    return out


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % ALIGNMENT == 0


def _smallest_tile(key: _Key, weight: Tensor) -> int:
    """Return the smallest tile in which a row has the same bits at any place."""
    size = _smallest.get(key)
    if size is None:
        size = _smallest[key] = _SMALLEST if _places_agree(weight) else _ALONE
        about = {"shape": list(weight.shape), "dtype": str(weight.dtype), "num_threads": key[-1]}
        if size == _ALONE:
            reason = "the library rounds a row by its place among others"
            _log.warning("rows_multiplied_alone", reason=reason, **about)
        if not _columns_agree(weight, size):
            reason = "the library rounds a column by its place: bits depend on the number of ranks"
            _log.warning("columns_round_by_place", reason=reason, **about)
    return size


def _places_agree(weight: Tensor) -> bool:
    rows = _samples(weight, _SMALLEST)
    expected = _filled(by_columns, rows, weight, _SMALLEST)
    turned = (
        _filled(by_columns, rows.roll(by, 0), weight, _SMALLEST).roll(-by, 0)
        for by in range(1, _SMALLEST)
    )
    if not all(_same_bits(expected, found) for found in turned):
        return False
    return _same_bits(expected[:1], _filled(by_columns, rows[:1], weight, _SMALLEST)[:1])


def _columns_agree(weight: Tensor, size: int) -> bool:
    """Tell whether a column has the same bits at other places in a tile of `size` rows."""
    rows = _samples(weight, size)
    expected = _filled(by_columns, rows, weight, size)
    return all(
        _same_bits(expected, _filled(by_columns, rows, weight.roll(by, 0), size).roll(-by, 1))
        for by in _TURNS
    )


def _agreeing_product(key: _Key, weight: Tensor, size: int) -> Product | None:
    """Return the fastest product for tiles of `size` rows with the bits of the measure, if any."""
    if (key, size) not in _agreeing:
        _agreeing[key, size] = _tried(weight, size, _smallest[key])
    return _agreeing[key, size]


def _tried(weight: Tensor, size: int, smallest: int) -> Product | None:
    if size > smallest and size * weight.shape[0] > _MOST_ELEMENTS:
        return None
    rows = _samples(weight, max(size, _SMALLEST))
    expected = [_filled(by_columns, part, weight, smallest) for part in torch.split(rows, smallest)]
    for product in (whole, whole_in_one_thread):
        found = [_filled(product, part, weight, size) for part in torch.split(rows, size)]
        if _same_bits(torch.cat(expected), torch.cat(found)):
            return product
    return None


def _samples(weight: Tensor, num_rows: int) -> Tensor:
    """
    Return rows for tests of products, whose results show in which order they were summed.

    Of each row's product with one column nothing but rounding errors is left: the numbers stand in
    pairs with opposite products. Results of other rows round to the same 16 bits in nearly every
    order. The columns are spread over the weight, from the first to the last.
    """
    num_columns, width = weight.shape
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.zeros((num_rows, width), dtype=weight.dtype)
    largest = weight.abs().max().float().clamp(min=2.0**-14)
    scale = torch.exp2(torch.floor(10 - torch.log2(largest)))  # errors must not vanish in float16
    for row in range(num_rows if width > 1 else 0):
        column = weight[row * (num_columns - 1) // max(1, num_rows - 1)] * scale
        first, second = torch.randperm(width, generator=generator)[: width // 2 * 2].view(2, -1)
        rows[row, first], rows[row, second] = column[second], -column[first]
    return rows


def _same_bits(expected: Tensor, found: Tensor) -> bool:
    kind = torch.int32 if expected.dtype.itemsize == 4 else torch.int16
    return torch.equal(expected.contiguous().view(kind), found.contiguous().view(kind))
