"""Check of a checkpoint's output projection: it may be the embedding (tied) or its own tensor."""

from __future__ import annotations

from dataclasses import replace

import torch

from executor_svc.model.config import ModelConfig
from executor_svc.model.files.checkpoint import Checkpoint, read_pieces
from executor_svc.start_warnings import warn

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"

_PIECE_ROWS = 1024


def settle_tie(config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> ModelConfig:
    """
    Correct `tied_embeddings` by what the files hold, as transformers 5 does.

    If config.json ties the two and the files hold both, they are tied only if they are equal in the
    type that is computed in; if they differ, config.json is wrong.

    Raises:
        InvalidModel: A file ends early.
    """
    if not config.tied_embeddings or not {EMBEDDING, OUTPUT} <= checkpoint.tensors.keys():
        return config
    if _are_equal(checkpoint, dtype):
        return config
    warn(
        "embeddings_not_tied",
        f"config.json says tie_word_embeddings, but {OUTPUT} differs from {EMBEDDING}: both "
        "are used; say tie_word_embeddings: false",
    )
    return replace(config, tied_embeddings=False)


def _are_equal(checkpoint: Checkpoint, dtype: torch.dtype) -> bool:
    left, right = checkpoint.tensors[EMBEDDING], checkpoint.tensors[OUTPUT]
    if left.shape != right.shape:
        return False
    with left.file.open("rb", buffering=0) as one, right.file.open("rb", buffering=0) as other:
        pieces = zip(
            read_pieces(left, one, rows=_PIECE_ROWS),
            read_pieces(right, other, rows=_PIECE_ROWS),
            strict=True,
        )
        return all(torch.equal(mine.to(dtype), its.to(dtype)) for (_, mine), (_, its) in pieces)
