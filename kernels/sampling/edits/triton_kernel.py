"""Biases and penalties on a device; past tokens are counted in integers, so order cannot matter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling.edits.reference import LogitEdits, Penalties, rule_out_others
from kernels.transfer import to_device

TILE = 1024

_IN_PROMPT = tl.constexpr(1 << 30)
"""Bit that is set in an id's count if the id is in the prompt."""

_MAX = tl.constexpr(torch.finfo(torch.float32).max)


def edited(logits: Tensor, edits: LogitEdits, rows: Tensor) -> Tensor:
    """
    Return a copy of some rows after their edits, float32 ``[N, V]``.

    Args:
        logits: Floating ``[R, V]``.
        edits: Edits of the whole batch; those of other rows are left out.
        rows: int64 ``[N]`` on the host, ascending.
    """
    copy = logits.index_select(0, to_device(rows, logits.device)).float()
    if edits.allowed is not None:
        allowed = edits.allowed.select(torch.isin(edits.allowed.row, rows))
        if len(allowed.row):
            rule_out_others(copy, allowed, torch.searchsorted(rows, allowed.row))
    if edits.biases is not None:
        biases = edits.biases.select(torch.isin(edits.biases.row, rows))
        if num_biases := len(biases.row):
            row = torch.searchsorted(rows, biases.row)
            columns = (
                to_device(column, copy.device) for column in (row, biases.token, biases.value)
            )
            grid = (triton.cdiv(num_biases, TILE),)
            _bias_kernel[grid](copy, *columns, num_biases, VOCAB=copy.shape[1], TILE=TILE)
    if edits.penalties is not None:
        penalties = edits.penalties.select(torch.isin(edits.penalties.row, rows))
        if len(penalties.row):
            row = torch.searchsorted(rows, penalties.row)
            _penalise(copy, to_device(row, copy.device), penalties)
    return copy


def _penalise(copy: Tensor, row: Tensor, penalties: Penalties) -> None:
    device, vocab_size = copy.device, copy.shape[1]
    history = penalties.history.contiguous()
    num_rows, width = history.shape
    count = torch.zeros((num_rows, vocab_size), dtype=torch.int32, device=device)
    lengths = (
        to_device(column, device) for column in (penalties.prompt_len, penalties.history_len)
    )
    grid = (num_rows, triton.cdiv(width, TILE))
    _count_kernel[grid](history, *lengths, count, width, VOCAB=vocab_size, TILE=TILE)
    strengths = (penalties.repetition, penalties.frequency, penalties.presence)
    tile = min(TILE, triton.next_power_of_2(vocab_size))
    grid = (num_rows, triton.cdiv(vocab_size, tile))
    _penalise_kernel[grid](
        copy,
        row,
        *(to_device(column, device) for column in strengths),
        count,
        VOCAB=vocab_size,
        TILE=tile,
        enable_fp_fusion=False,  # product and difference are rounded separately, as defined
    )


@triton.jit(do_not_specialize=["num_biases"])
def _bias_kernel(
    copy: tl.tensor,
    row: tl.tensor,
    token: tl.tensor,
    value: tl.tensor,
    num_biases: tl.int32,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """
    Add biases: copy[row[b], token[b]] += value[b].

    Grid (cdiv(num_biases, TILE),). copy fp32 [N, VOCAB]; row, token int64, value fp32 [num_biases];
    entries >= num_biases are masked. Offsets int64. Only bans (-infinity) can share an id with
    another entry, so the order of atomic additions does not matter.
    Oracle: `reference.add_biases`.
    """
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    known = at < num_biases
    place = tl.load(row + at, mask=known, other=0) * VOCAB
    place += tl.load(token + at, mask=known, other=0)
    tl.atomic_add(copy + place, tl.load(value + at, mask=known, other=0.0), mask=known)


@triton.jit(do_not_specialize=["width"])
def _count_kernel(
    history: tl.tensor,
    prompt_len: tl.tensor,
    history_len: tl.tensor,
    count: tl.tensor,
    width: tl.int32,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """
    Count ids: count[p, i] is the times that id i stands in row p's output, with the bit _IN_PROMPT
    if it stands in the prompt.

    Grid (P, cdiv(width, TILE)). history int32 [P, width], ids in [0, VOCAB) up to history_len[p];
    prompt_len, history_len int64 [P]; count int32 [P, VOCAB], 0 before. Places past history_len[p]
    are masked. Offsets int64; integer sums, the same in any order.
    Oracle: `sampling.reference.count_tokens`.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    known = (at < tl.load(history_len + row)) & (at < width)
    token = tl.load(history + row * width + at, mask=known, other=0)
    is_output = at >= tl.load(prompt_len + row)
    place = count + row * VOCAB + token
    one = tl.full((TILE,), 1, tl.int32)
    tl.atomic_add(place, one, mask=known & is_output)
    tl.atomic_or(place, one * _IN_PROMPT, mask=known & (at < tl.load(prompt_len + row)))


@triton.jit
def _penalise_kernel(
    copy: tl.tensor,
    row: tl.tensor,
    repetition: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
    count: tl.tensor,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """
    Penalise copy[row[p], i] in place for every id i in prompt or output of p.

    Grid (P, cdiv(VOCAB, TILE)). copy fp32 [N, VOCAB]; row int64, penalties fp32 [P]; count int32
    [P, VOCAB] as `_count_kernel` leaves it. Ids >= VOCAB and those not seen are masked. Offsets
    int64; no fused multiply-add, so that the bits are the oracle's.
    Oracle: `reference.penalised`.
    """
    place = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = ids < VOCAB
    mark = tl.load(count + place * VOCAB + ids, mask=inside, other=0)
    seen = mark > 0
    target = copy + tl.load(row + place) * VOCAB + ids
    before = tl.load(target, mask=seen, other=0.0)
    strength = tl.load(repetition + place)
    after = tl.where(before > 0, tl.div_rn(before, strength), before * strength)
    times = (mark & (_IN_PROMPT - 1)).to(tl.float32)
    after = after - tl.load(frequency + place) * times
    after = after - tl.load(presence + place) * tl.minimum(times, 1.0)
    after = tl.minimum(tl.maximum(after, -_MAX), _MAX)
    finite = (before > float("-inf")) & (before < float("inf"))
    tl.store(target, tl.where(finite, after, before), mask=seen)
