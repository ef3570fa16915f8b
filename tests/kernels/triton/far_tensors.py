"""
Kernels over tensors of more than 2**31 elements, next to the same numbers side by side.

The functions are run in a process of their own, because a wrong address may end the process. Pages that
are never touched take no memory. Where a launch would compute all elements of a large tensor, the
kernel is launched over the few programs that the numbers need.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.decode_rows import DecodeRowColumns, SlotColumns, TokenRing
from kernels.decode_rows import reference as decode_reference
from kernels.decode_rows import triton_kernel as decode_rows
from kernels.linear.triton_kernel import linear_kernel, merge_kernel
from kernels.patch_rows import triton_kernel as patch_rows
from kernels.sampling import SamplingColumns
from kernels.sampling.edits import triton_kernel as edits
from kernels.sampling.logprobs import triton_kernel as logprobs

STRIDE = 1_100_000_000
"""Elements of a row: the third row begins behind 2**31."""

assert 2 * STRIDE > 2**31


def far(near: Tensor) -> Tensor:
    """Return rows of `STRIDE` elements that begin with those of `near`; the others are unknown."""
    rows = torch.empty((len(near), STRIDE), dtype=near.dtype)
    rows[:, : near.shape[1]] = near
    return rows


def integers(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Return small integers: their products and sums are exact in any order."""
    return torch.randint(-4, 5, shape).to(dtype)


def products_of_far_rows() -> None:
    """Multiply the first part of rows of x and of the weight."""
    x, weight = integers(3, 16), integers(3, 16)
    partial = torch.full((1, 3, 3), float("nan"))
    linear_kernel[(1, 1)](
        far(x), far(weight), partial, partial, partial, 3, COLUMNS=3, WIDTH=STRIDE, **tile(STRIDE)
    )
    assert torch.equal(x.float() @ weight.float().T, partial[0])


def products_to_far_rows() -> None:
    """Add a product to the first columns of rows, in one go and by parts."""
    x, weight, held = integers(3, 16), integers(16, 16), integers(3, 16)
    expected = held + x @ weight.T
    out = far(held)
    linear_kernel[(1, 1)](
        x, weight, out, out, out, 3, COLUMNS=STRIDE, WIDTH=16, **tile(16, direct=True, adds=True)
    )
    assert torch.equal(expected, out[:, :16])
    out, partial = far(held), far(torch.full((3, 16), float("nan"), dtype=torch.float32))
    linear_kernel[(1, 1)](x, weight, out, out, partial, 3, COLUMNS=STRIDE, WIDTH=16, **tile(16))
    merge(3, partial, out, num_parts=1)
    assert torch.equal(expected, out[:, :16])


def products_by_far_parts() -> None:
    """Multiply one row in three parts; the sums of the third lie behind 2**31 elements."""
    x, weight, held = integers(1, 48), integers(16, 48), integers(1, 16)
    out, partial = far(held), far(torch.full((3, 16), float("nan"), dtype=torch.float32))
    linear_kernel[(1, 3)](
        x, weight, out, out, partial, 1, COLUMNS=STRIDE, WIDTH=48, **tile(48, parts=3)
    )
    merge(1, partial, out, num_parts=3)
    assert torch.equal(held + x @ weight.T, out[:, :16])


def tile(width: int, *, parts: int = 1, direct: bool = False, adds: bool = False) -> dict[str, Any]:
    """Return the sizes of a tile whose parts are 16 elements of each row of one chunk."""
    sizes = {"ROW_TILE": 16, "COLUMN_TILE": 16, "DEPTH": 16, "PART_TILES": 1, "NUM_PARTS": parts}
    flags = {"JOINS": False, "DIRECT": direct, "BIASED": False, "ADDS": adds}
    return {"CHUNK_WIDTH": width, **sizes, **flags}


def merge(num_rows: int, partial: Tensor, out: Tensor, *, num_parts: int) -> None:
    """Merge the parts of the first 16 columns."""
    merge_kernel[(num_rows, 1)](
        partial,
        out,
        out,
        num_rows,
        COLUMNS=STRIDE,
        NUM_CHUNKS=1,
        NUM_PARTS=num_parts,
        COLUMN_TILE=16,
        BIASED=False,
        ADDS=True,
    )


def decode_rows_of_far_slots() -> None:
    """Begin and end a step whose tables, histories and ring have long rows."""
    tables, histories = integers(3, 8, dtype=torch.int32), integers(3, 8, dtype=torch.int32)
    ring = integers(3, 3, dtype=torch.int32)
    near, wide = (
        (
            slots(keep(tables), keep(histories)),
            rows(keep(torch.zeros(3, 8, dtype=torch.int32))),
            TokenRing(tokens=keep(ring), line=torch.tensor([1], dtype=torch.int32)),
        )
        for keep in (Tensor.clone, far)
    )
    token, valid = torch.tensor([70, 80, 90]), torch.tensor([True, True, False])
    for module, scene in ((decode_reference, near), (decode_rows, wide)):
        module.gather_rows(*scene, 1)
        module.advance_rows(scene[0], scene[1], token, valid, scene[2])
    lengths = near[1].seq_len.tolist()
    assert lengths == wide[1].seq_len.tolist()
    for row, length in enumerate(lengths):
        assert torch.equal(near[1].block_table[row, :length], wide[1].block_table[row, :length])
    assert torch.equal(near[1].token_id, wide[1].token_id)
    assert torch.equal(near[1].kv_position, wide[1].kv_position)
    assert torch.equal(near[0].history, wide[0].history[:, :8])
    assert torch.equal(near[2].tokens, wide[2].tokens[:, :3])


def slots(block_table: Tensor, history: Tensor) -> SlotColumns:
    """Return three slots at different positions."""
    return SlotColumns(
        position=torch.tensor([3, 0, 6], dtype=torch.int32),
        block_table=block_table,
        history=history,
        **parameters(),
    )


def rows(block_table: Tensor) -> DecodeRowColumns:
    """Return rows of three slots, the last slot first."""
    whole = torch.zeros(3, dtype=torch.int64)
    return DecodeRowColumns(
        slot=torch.tensor([2, 0, 1], dtype=torch.int32),
        token_id=whole.int(),
        position=whole.clone(),
        kv_position=whole.clone(),
        seq_len=whole.int(),
        block_table=block_table,
        sampling=SamplingColumns(position=whole.clone(), **parameters()),
    )


def parameters() -> dict[str, Tensor]:
    """Return sampling parameters of three rows."""
    real, whole = torch.ones(3), torch.ones(3, dtype=torch.int64)
    return {
        "temperature": real,
        "top_k": whole.int(),
        "top_p": real.clone(),
        "seed": whole,
        "choice": whole.clone(),
        "min_p": real.clone(),
    }


def patches_of_the_last_word() -> None:
    """Change the last word that a patch can name, and read a patch of most words."""
    words = torch.empty(2**31 - 1, dtype=torch.int32)
    patch = torch.tensor([[2**31 - 2, -1, 5], [7, 8, 9]], dtype=torch.int32)
    patch_rows.patch_rows(words, patch)
    assert [7, 9] == [int(words[-1]), int(words[5])]
    num_words = 2**31 - 100
    places = torch.arange(patch_rows.TILE, dtype=torch.int32)
    patch = torch.empty(num_words + patch_rows.TILE, dtype=torch.int32)
    patch[: patch_rows.TILE], patch[num_words:] = places, 1000 + places
    patch_rows._patch_rows_kernel[(1,)](words, patch, num_words, TILE=patch_rows.TILE)
    assert torch.equal(1000 + places, words[: patch_rows.TILE])


def edits_of_far_rows() -> None:
    """Add biases to, and penalise, rows of long vocabularies with long histories."""
    logits, history = torch.randn(3, 32), torch.randint(0, 32, (3, 16), dtype=torch.int32)
    expected, found = (
        edited(keep(logits), keep(torch.zeros(3, 32, dtype=torch.int32)), keep(history))
        for keep in (Tensor.clone, far)
    )
    assert not torch.equal(logits, expected)
    assert torch.equal(expected, found[:, :32])


def edited(copy: Tensor, count: Tensor, history: Tensor) -> Tensor:
    """Launch the kernels of biases and penalties over the first 32 ids."""
    vocab = copy.shape[1]
    row = torch.tensor([2, 0, 1])
    half = torch.full((3,), 0.5)
    edits._bias_kernel[(1,)](copy, row, torch.tensor([4, 31, 0]), half, 3, VOCAB=vocab, TILE=4)
    lengths = (torch.tensor([2, 0, 16]), torch.tensor([9, 16, 16]))
    edits._count_kernel[(3, 1)](history, *lengths, count, history.shape[1], VOCAB=vocab, TILE=16)
    edits._penalise_kernel[(3, 1)](copy, row, half, half, half, count, VOCAB=vocab, TILE=32)
    return copy


def log_sums_of_far_rows() -> None:
    """Sum the first split of rows of long vocabularies."""
    values = torch.randn(3, 64)
    largest, total, out = (torch.full((3, 1), float("nan")) for _ in range(3))
    logprobs._part_kernel[(3, 1)](far(values), largest, total, VOCAB=STRIDE, SPLIT=64)
    logprobs._merge_kernel[(3,)](largest, total, out, NUM_SPLITS=1, SPLITS_2=1)
    assert torch.equal(logprobs.log_total(values), out)
