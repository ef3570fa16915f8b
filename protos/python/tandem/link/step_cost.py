"""How long a step may take, judged by what steps before it took."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tandem.link.batch import Batch, Command

ALWAYS_ALLOWED_S = 10.0
"""A step younger than this is never late."""
COMMAND_ALLOWED_S = 300.0
"""Likewise one that moves KV memory instead of computing; its time says nothing about steps."""
SLACK = 20.0
"""A step is late when it takes this many times what its work predicts."""
FORGET = 0.98
"""Weight of the past at every step learned: about fifty steps count."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """
    What a step computes: `num_tokens` through all layers, and `num_pairs` of a token with one it
    attends to, summed over rows.
    """

    num_tokens: float
    num_pairs: float

    @classmethod
    def of(cls, batch: Batch) -> StepWork:
        """Of a batch; costs a few microseconds."""
        num_tokens = batch.row_num_tokens.astype(np.float64)
        pairs = num_tokens @ (batch.row_start + 0.5 * (num_tokens + 1.0))
        return cls(float(num_tokens.sum()), float(pairs))


class StepCost:
    """
    Learns seconds per token and per attended pair from steps that went well.

    A prediction is the sum of two estimates, each of which puts down all of the time seen to one
    kind of work. So it is at most twice too high for steps like those seen, and for others it grows
    with whichever kind of work they have more of: a long prompt after many decodes is given the
    time that its tokens, and its context, would take at the decodes' pace, which is slower.
    """

    __slots__ = ("_pairs", "_seconds", "_tokens")

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0.0
        self._pairs = 0.0

    def learn(self, work: StepWork, seconds: float) -> None:
        """Take in how long a step computed; nothing was learned from one without work."""
        if work.num_tokens <= 0:
            return
        self._seconds = FORGET * self._seconds + seconds
        self._tokens = FORGET * self._tokens + work.num_tokens
        self._pairs = FORGET * self._pairs + work.num_pairs

    def predict_s(self, work: StepWork) -> float:
        """Seconds that a step may be expected to compute; 0 while nothing is known."""
        if not self._tokens:
            return 0.0
        per_token, per_pair = self._seconds / self._tokens, self._seconds / self._pairs
        return per_token * work.num_tokens + per_pair * work.num_pairs

    def allowed_s(self, command: Command) -> float:
        """Seconds after which a running step is late."""
        if not isinstance(command, Batch):
            return COMMAND_ALLOWED_S
        return max(ALWAYS_ALLOWED_S, SLACK * self.predict_s(StepWork.of(command)))
