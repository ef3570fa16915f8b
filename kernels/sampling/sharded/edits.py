"""Edits of a rank's logits: those of its own ids."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from kernels.sampling.edits.reference import LogitEdits
from kernels.sampling.logprobs.reference import rows_per_copy
from kernels.sampling.sharded.shard import VocabularyShard
from kernels.transfer import to_device


def edited(logits: Tensor, edits: LogitEdits, shard: VocabularyShard) -> Tensor:
    """
    Return the logits after the edits of all ranks' ids: float32 ``[R, width]``.

    Rows get one more logit while they are edited, which stands for the ids of all other ranks: so a
    row whose allowed ids are elsewhere has none here, and histories stay whole.
    """
    values = logits.to(torch.float32, copy=True)
    own = _by_place(edits, shard)
    for rows in torch.split(edits.rows, rows_per_copy(logits)):
        here = to_device(rows, logits.device)
        wide = functional.pad(values[here], (0, 1))
        own.apply(wide, rows)
        values[here] = wide[:, :-1]
    return values


def _by_place(edits: LogitEdits, shard: VocabularyShard) -> LogitEdits:
    """Return the edits with places instead of ids."""
    allowed, biases, penalties = edits.allowed, edits.biases, edits.penalties
    if allowed is not None:
        allowed = replace(allowed, token=shard.places_of(allowed.token))
    if biases is not None:
        biases = replace(biases, token=shard.places_of(biases.token))
    if penalties is not None:
        penalties = replace(penalties, history=shard.places_of(penalties.history))
    return LogitEdits(allowed=allowed, biases=biases, penalties=penalties)
