"""The steps that a runner executes before the first request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from executor_svc.model.weights import DecoderWeights
from kernels.linear.tuning import rows_to_join
from tandem.link.batch import ROW_SAMPLES, Admission, Batch
from tandem.sampling_params import SamplingParams

_PROMPT_LEN = 32
_LONG_LEN = 65
_SHORT_LEN = 2
"""
Prompt lengths with and without compiled kernels; compiled kernels have different tiles for many
queries (_LONG_LEN) and for few (_SHORT_LEN).
"""

_CUT_ROWS = (17, 65)
"""Numbers of rows from which compiled kernels divide the drawing of tokens differently."""

_FILTERED = SamplingParams(temperature=1.0, top_k=2, top_p=0.9, seed=0)
_EDITED = replace(_FILTERED, frequency_penalty=0.1, logit_bias=((0, 1.0),), logprobs=1)
"""One penalty stands for all: a kernel applies the three together."""


def warm_up_batches(
    max_tokens: int,
    block_size: int,
    max_rows: int,
    *,
    compiles: bool,
    step_tokens: int = 0,
    num_blocks: int = 0,
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
        step_tokens: Tokens of one more step where kernels are compiled, of as many prompts as it
            takes, or of fewer tokens if there is no room for these; 0 for no such step.
        num_blocks: Blocks for the prompts of that step.
    """
    if not compiles:
        return _sequence(1, _PROMPT_LEN, max_tokens, block_size, _FILTERED)
    batches = _sequence(1, _LONG_LEN, max_tokens, block_size, _FILTERED)
    batches.append(_release(1))
    batches += _sequence(2, _SHORT_LEN, max_tokens, block_size, _EDITED)
    batches.append(_release(1))
    for num_rows in sorted({min(count, max_rows) for count in (*_CUT_ROWS, max_rows)}):
        admits = [
            _admission(slot, 2 + num_rows, 1, [1 + slot], _EDITED) for slot in range(num_rows)
        ]
        batches += [_rows(0, 1, admits), _release(num_rows)]
    if step_tokens:
        admits = list(_prompts(3 + max_rows, step_tokens, max_tokens, block_size, num_blocks))
        batches += [_prefill(admits[:max_rows]), _release(len(admits[:max_rows]))]
    return batches


def undivided_tokens(weights: DecoderWeights) -> int:
    """
    Return from how many tokens on compiled kernels divide no product of batch-invariant rows with
    a layer's weights.
    """
    layer = weights.layers[0]
    products = (layer.qkv, layer.output, layer.gate_up, layer.down)
    return rows_to_join(min(map(len, products)), layer.qkv.dtype)


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


def _prompts(
    generation: int, num_tokens: int, max_tokens: int, block_size: int, num_blocks: int
) -> Iterator[Admission]:
    """Yield prompts of `num_tokens` in all, one a slot, each as long as there is room for it."""
    slot, first = 0, 1
    while num_tokens > 0 and first <= num_blocks:
        length = min(num_tokens, max_tokens, (num_blocks + 1 - first) * block_size)
        end = first + math.ceil(length / block_size)
        yield _admission(slot, generation, length, range(first, end), _FILTERED)
        num_tokens, slot, first = num_tokens - length, slot + 1, end


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


def _prefill(admits: Sequence[Admission]) -> Batch:
    """Make a batch that computes the prompts of the slots it admits, and samples."""
    lengths = np.array([len(each.token_ids) for each in admits], np.int32)
    return replace(_rows(0, 1, admits), row_num_tokens=lengths)


def _release(num_slots: int) -> Batch:
    return Batch(release_slot=np.arange(num_slots, dtype=np.int32))
