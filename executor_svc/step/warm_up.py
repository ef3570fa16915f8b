"""The steps that a runner executes before the first request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from tandem.link.batch import ROW_SAMPLES, Admission, Batch
from tandem.sampling_params import SamplingParams

_PROMPT_LEN = 32
_LONG_LEN = 65
_SHORT_LEN = 2
"""
Prompt lengths with and without compiled kernels; compiled kernels have different tiles for many
queries (_LONG_LEN) and for few (_SHORT_LEN).
"""

_INVARIANT_LEN = 2112
"""
Prompt length from which on compiled kernels divide no product of batch-invariant rows, where
weights have at least 1,024 columns; see `splits` in kernels/linear/tuning.py.
"""

_CUT_ROWS = (17, 65)
"""Numbers of rows from which compiled kernels divide the drawing of tokens differently."""

_FILTERED = SamplingParams(temperature=1.0, top_k=2, top_p=0.9, seed=0)
_EDITED = replace(_FILTERED, frequency_penalty=0.1, logit_bias=((0, 1.0),), logprobs=1)
"""One penalty stands for all: a kernel applies the three together."""


def warm_up_batches(
    max_tokens: int, block_size: int, max_rows: int, *, compiles: bool, invariant_tokens: int = 0
) -> list[Batch]:
    """
    Return the batches to run: a prompt in slot 0 that samples, then a decode if there is room.

    Args:
        max_tokens: Most tokens of one sequence for which there are blocks, at least 1.
        block_size: Tokens per block; blocks from 1 on are used.
        max_rows: Most rows of a step for which there are slots and blocks, at least 1.
        compiles: True if kernels are compiled at their first use. Then the prompt is longer, and a
            short one and steps of many rows follow, with edits of logits and logprobs, so that no
            request waits for a compilation.
        invariant_tokens: Most tokens of a step if its rows are batch-invariant; that prompt is
            longer then.
    """
    if not compiles:
        return _sequence(1, _PROMPT_LEN, max_tokens, block_size, _FILTERED)
    longest = max(_LONG_LEN, min(_INVARIANT_LEN, invariant_tokens))
    batches = _sequence(1, longest, max_tokens, block_size, _FILTERED)
    batches.append(_release(1))
    batches += _sequence(2, _SHORT_LEN, max_tokens, block_size, _EDITED)
    batches.append(_release(1))
    for num_rows in sorted({min(count, max_rows) for count in (*_CUT_ROWS, max_rows)}):
        admits = [
            _admission(slot, 2 + num_rows, 1, [1 + slot], _EDITED) for slot in range(num_rows)
        ]
        batches += [_rows(0, 1, admits), _release(num_rows)]
    return batches


def _sequence(
    generation: int, longest: int, max_tokens: int, block_size: int, sampling: SamplingParams
) -> list[Batch]:
    """Make a prompt of up to `longest` tokens in slot 0 and, if there is room, a decode."""
    prompt_len = max(1, min(longest, max_tokens - 1))
    num_blocks = math.ceil(min(prompt_len + 1, max_tokens) / block_size)
    admission = _admission(0, generation, prompt_len, range(1, num_blocks + 1), sampling)
    batches = [_rows(0, prompt_len, [admission])]
    if prompt_len < max_tokens:
        batches.append(_rows(prompt_len, 1))
    return batches


def _admission(
    slot: int, generation: int, prompt_len: int, blocks: Iterable[int], sampling: SamplingParams
) -> Admission:
    return Admission(
        slot=slot,
        generation=generation,
        token_ids=np.zeros(prompt_len, np.int32),
        num_prompt_tokens=prompt_len,
        num_cached_tokens=0,
        block_ids=np.array(list(blocks), np.int32),
        sampling=sampling,
    )


def _rows(start: int, num_tokens: int, admits: Sequence[Admission] = ()) -> Batch:
    """Make a batch that computes tokens of the slots it admits, else of slot 0, and samples."""
    num_rows = max(1, len(admits))
    return Batch(
        admits=tuple(admits),
        row_slot=np.arange(num_rows, dtype=np.int32),
        row_num_tokens=np.full(num_rows, num_tokens, np.int32),
        row_start=np.full(num_rows, start, np.int32),
        row_flags=np.full(num_rows, ROW_SAMPLES, np.uint8),
    )


def _release(num_slots: int) -> Batch:
    return Batch(release_slot=np.arange(num_slots, dtype=np.int32))
