"""Time that a step may take, predicted from the times of earlier steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tandem.link.batch import Batch
from tandem.link.commands import Command

ALWAYS_ALLOWED_S = 10.0
"""Seconds before which no step is late."""
COMMAND_ALLOWED_S = 300.0
"""Seconds before which a suspend or resume step, which moves KV memory, is not late."""
SLACK = 20.0
"""Multiple of the predicted time after which a step is late."""
FORGET = 0.98
"""Weight of the past at every step learned, so that about fifty steps count."""
LEARN_EVERY = 16
"""Number of steps between two updates by quick steps, as an update costs microseconds."""
LEARN_OVER_S = 0.05
"""Seconds above which the time of every step is learned."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """
    Work of a step: `num_tokens` through all layers, and `num_pairs` of a token with a token that it
    attends to, summed over rows.
    """

    num_tokens: float
    num_pairs: float

    @classmethod
    def of(cls, batch: Batch) -> StepWork:
        """Return the work of a batch; this costs a few microseconds."""
        num_tokens = batch.row_num_tokens.astype(np.float64)
        pairs = num_tokens @ (batch.row_start + 0.5 * (num_tokens + 1.0))
        return cls(float(num_tokens.sum()), float(pairs))


class StepCost:
    """
    Cost model of steps: seconds per token and per attended pair, learned from successful steps.

    A prediction is the sum of two estimates, each of which attributes all of the time seen to one
    kind of work. So it is at most twice too high for steps like those seen. For other steps it
    grows with the kind of work that they have more of: a long prompt after many decodes is allowed
    the time that its tokens and its context would take at the pace of decodes, which is slower.
    """

    __slots__ = ("_pairs", "_seconds", "_tokens")

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0.0
        self._pairs = 0.0

    def learn(self, work: StepWork, seconds: float) -> None:
        """Learn the time of a step; a step without work is ignored."""
        if work.num_tokens <= 0:
            return
        self._seconds = FORGET * self._seconds + seconds
        self._tokens = FORGET * self._tokens + work.num_tokens
        self._pairs = FORGET * self._pairs + work.num_pairs

    def learn_some(self, number: int, command: Command, seconds: float) -> None:
        """
        Learn the time of a step if it is a batch, and took long or is one of every `LEARN_EVERY`.

        Args:
            number: Number of the step, which counts up by one.
            command: The step, which succeeded.
            seconds: Time that it took.
        """
        if isinstance(command, Batch) and (number % LEARN_EVERY == 0 or seconds > LEARN_OVER_S):
            self.learn(StepWork.of(command), seconds)

    def predict_s(self, work: StepWork) -> float:
        """Return the seconds that a step is expected to compute; 0 before any step was learned."""
        if not self._tokens:
            return 0.0
        per_token, per_pair = self._seconds / self._tokens, self._seconds / self._pairs
        return per_token * work.num_tokens + per_pair * work.num_pairs

    def allowed_s(self, command: Command) -> float:
        """Return the seconds after which a running step is late."""
        if not isinstance(command, Batch):
            return COMMAND_ALLOWED_S
        return max(ALWAYS_ALLOWED_S, SLACK * self.predict_s(StepWork.of(command)))
