"""patch_rows as one scatter."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 256
NUM_WARPS = 2


def patch_rows(words: Tensor, patch: Tensor) -> None:
    """Write words; arguments are as in the package's `patch_rows`, unchecked."""
    num_words = patch.shape[1]
    if num_words:
        _patch_rows_kernel[(triton.cdiv(num_words, TILE),)](
            words, patch, num_words, TILE=TILE, num_warps=NUM_WARPS
        )


@triton.jit(do_not_specialize=["num_words"])
def _patch_rows_kernel(
    words: tl.tensor, patch: tl.tensor, num_words: tl.int32, TILE: tl.constexpr
) -> None:
    """
    Set words[patch[0, n]] = patch[1, n] where patch[0, n] >= 0.

    Grid (cdiv(num_words, TILE),). words [W] int32, W < 2**31; patch [2, num_words] int32, its
    places below W, which the host checks; elements >= num_words are masked. Offsets int64.
    Oracle: `reference.patch_rows`.
    """
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < num_words
    place = tl.load(patch + at, mask=inside, other=-1)
    word = tl.load(patch + num_words.to(tl.int64) + at, mask=inside, other=0)
    tl.store(words + place.to(tl.int64), word, mask=place >= 0)
