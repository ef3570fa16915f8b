"""The steps that a runner does before the first request."""

from __future__ import annotations

import math

import numpy as np

from tandem.link.batch import ROW_SAMPLES, Admission, Batch, RowSampling

_PROMPT_LEN = 32
_SHORT_LEN = 2
"""Kernels that are compiled have other tiles for so few queries."""

_FILTERED = RowSampling(temperature=1.0, top_k=2, top_p=0.9, seed=0)
_EDITED = RowSampling(
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    seed=0,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    logit_bias=((0, 1.0),),
    logprobs=1,
)


def warm_up_batches(max_tokens: int, block_size: int, *, compiles: bool) -> list[Batch]:
    """
    A prompt in slot 0 that samples, then a decode, if there is room for one.

    Args:
        max_tokens: Most tokens of one sequence that there are blocks for, at least 1.
        block_size: Tokens per block; blocks from 1 on are used.
        compiles: Kernels are compiled at their first use: a short prompt and its decode follow,
            with edits of logits and log probabilities, so that no request waits for those.
    """
    batches = _sequence(1, _PROMPT_LEN, max_tokens, block_size, _FILTERED)
    if compiles:
        batches.append(Batch(release_slot=np.zeros(1, np.int32)))
        batches += _sequence(2, _SHORT_LEN, max_tokens, block_size, _EDITED)
    return batches


def _sequence(
    generation: int, longest: int, max_tokens: int, block_size: int, sampling: RowSampling
) -> list[Batch]:
    """A prompt of up to `longest` tokens in slot 0 and, where there is room, a decode."""
    prompt_len = max(1, min(longest, max_tokens - 1))
    num_blocks = math.ceil(min(prompt_len + 1, max_tokens) / block_size)
    admission = Admission(
        slot=0,
        generation=generation,
        token_ids=np.zeros(prompt_len, np.int32),
        num_prompt_tokens=prompt_len,
        num_cached_tokens=0,
        block_ids=np.arange(1, num_blocks + 1, dtype=np.int32),
        sampling=sampling,
    )
    batches = [_one_row(0, prompt_len, admits=(admission,))]
    if prompt_len < max_tokens:
        batches.append(_one_row(prompt_len, 1))
    return batches


def _one_row(start: int, num_tokens: int, admits: tuple[Admission, ...] = ()) -> Batch:
    """A batch that computes some tokens of slot 0 and samples."""
    return Batch(
        admits=admits,
        row_slot=np.array([0], np.int32),
        row_num_tokens=np.array([num_tokens], np.int32),
        row_start=np.array([start], np.int32),
        row_flags=np.array([ROW_SAMPLES], np.uint8),
    )
