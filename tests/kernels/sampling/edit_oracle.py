"""Biases, penalties, min_p and log probabilities of one row at a time, in NumPy's float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from kernels.sampling import Allowed, Biases, LogitEdits, Penalties


@dataclass(frozen=True, kw_only=True)
class RowEdits:
    """Values that change one row's logits, in plain Python."""

    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    banned: tuple[int, ...] = ()
    allowed: tuple[int, ...] = ()


def edited_row(logits: np.ndarray, row: RowEdits) -> np.ndarray:
    """Edit a row as defined, id by id, shape ``[V]``."""
    edited = logits.astype(np.float64)
    if row.allowed:
        edited[~np.isin(np.arange(len(edited)), row.allowed)] = -np.inf
    for token in row.banned:
        edited[token] = -np.inf
    for token, value in row.bias:
        edited[token] += value
    for token in range(len(edited)):
        if token in row.prompt or token in row.output:
            if edited[token] > 0:
                edited[token] /= row.repetition
            else:
                edited[token] *= row.repetition
        times = row.output.count(token)
        edited[token] -= row.frequency * times
        if times > 0:
            edited[token] -= row.presence
    return edited


def edits_of(rows: dict[int, RowEdits], *, padding: int = 3, junk: int = 0) -> LogitEdits:
    """Return the same edits as columns; histories are padded with an id that must not matter."""
    places = sorted(rows)
    bias = [
        (place, token, value)
        for place in places
        for token, value in (
            *rows[place].bias,
            *((token, float("-inf")) for token in rows[place].banned),
        )
    ]
    allowed = [(place, token) for place in places for token in rows[place].allowed]
    histories = [[*rows[place].prompt, *rows[place].output] for place in places]
    width = padding + max(map(len, histories), default=1)
    padded = [tokens + [junk] * (width - len(tokens)) for tokens in histories]
    return LogitEdits(
        allowed=Allowed(
            row=torch.tensor([entry[0] for entry in allowed], dtype=torch.int64),
            token=torch.tensor([entry[1] for entry in allowed], dtype=torch.int64),
        ),
        biases=Biases(
            row=torch.tensor([entry[0] for entry in bias], dtype=torch.int64),
            token=torch.tensor([entry[1] for entry in bias], dtype=torch.int64),
            value=torch.tensor([entry[2] for entry in bias], dtype=torch.float32),
        ),
        penalties=Penalties(
            row=torch.tensor(places, dtype=torch.int64),
            repetition=torch.tensor([rows[place].repetition for place in places]),
            frequency=torch.tensor([rows[place].frequency for place in places]),
            presence=torch.tensor([rows[place].presence for place in places]),
            prompt_len=torch.tensor(
                [len(rows[place].prompt) for place in places], dtype=torch.int64
            ),
            history_len=torch.tensor([len(tokens) for tokens in histories], dtype=torch.int64),
            history=torch.tensor(padded, dtype=torch.int32).reshape(len(places), width),
        ),
    )


@st.composite
def row_edits(draw: st.DrawFn, vocab_size: int) -> RowEdits:
    """Draw any edits of a row that leave it something to draw."""
    ids = st.integers(0, vocab_size - 1)
    penalty = st.sampled_from([0.0, 0.25, 1.5, -0.75, -2.0])
    banned = draw(st.sets(ids, max_size=vocab_size - 1))
    left = sorted(set(range(vocab_size)) - banned)
    allowed = {*draw(st.sets(ids)), draw(st.sampled_from(left))} if draw(st.booleans()) else set()
    return RowEdits(
        prompt=tuple(draw(st.lists(ids, min_size=1, max_size=6))),
        output=tuple(draw(st.lists(ids, max_size=8))),
        repetition=draw(st.sampled_from([1.0, 1.3, 0.5, 2.0])),
        frequency=draw(penalty),
        presence=draw(penalty),
        bias=tuple(draw(st.dictionaries(ids, st.floats(-5, 5, width=16), max_size=3)).items()),
        banned=tuple(banned),
        allowed=tuple(allowed),
    )
