"""The same queries attended at once, and in chunks of any length among other rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from kernels.paged_attention import AttentionPlan, AttentionShape, PagedSequences
from tests.kernels.test_paged_attention import scene

Planner = Callable[[PagedSequences, AttentionShape, int | None], AttentionPlan]

LENGTHS = (150, 67, 9)
CUTS = {
    "one by one": [1] * 150,
    "among others": [150],
    "chunks": [1, 2, 5, 8, 9, 40, 1, 1, 20, 17, 46],
}
"""Query lengths of the first row, step by step; the others go on by what is in `OTHERS`."""

OTHERS = (3, 1)
SCALE = 0.3


def attended_at_once(plan: Planner, of: AttentionShape, window: int | None) -> torch.Tensor:
    """Return the first row's results, computed alone and as a whole."""
    sequences, query, cache = scene([(length, length) for length in LENGTHS], of)
    alone = PagedSequences(
        query_len=sequences.query_len[:1],
        seq_len=sequences.seq_len[:1],
        block_table=sequences.block_table[:1],
    )
    return plan(alone, of, window).attend(query[: LENGTHS[0]], cache, SCALE)


def attended_in_chunks(
    plan: Planner, of: AttentionShape, window: int | None, cuts: list[int]
) -> torch.Tensor:
    """Return the first row's results, computed chunk by chunk, after two others."""
    sequences, query, cache = scene([(length, length) for length in LENGTHS], of)
    first = np.cumsum(LENGTHS) - LENGTHS
    found, done = [], 0
    for step, length in enumerate(cuts):
        rows, lengths = [1, 2, 0], [*OTHERS, length]
        starts = [step * other % (LENGTHS[row] - other) for row, other in enumerate(OTHERS, 1)] + [
            done
        ]
        batch = PagedSequences(
            query_len=np.array(lengths, np.int32),
            seq_len=np.array(starts, np.int32) + np.array(lengths, np.int32),
            block_table=sequences.block_table[rows],
        )
        places = [
            np.arange(first[row] + start, first[row] + start + number)
            for row, start, number in zip(rows, starts, lengths, strict=True)
        ]
        result = plan(batch, of, window).attend(query[np.concatenate(places)], cache, SCALE)
        found.append(result[len(result) - length :])
        done += length
    return torch.cat(found)


def invariant(of: AttentionShape) -> AttentionShape:
    """Return the same heads and cache, with bits that depend on sequence and position alone."""
    return replace(of, batch_invariant=True)
