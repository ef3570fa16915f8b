"""
The learning rate as a function of tokens: warm up, hold for as long as one likes, then decay.

A run that holds has no planned end and can be stopped and resumed for ever. A decay is a branch
off it: a copy of the weights whose rates fall to zero, which is what gets exported.
"""

from __future__ import annotations

from dataclasses import dataclass

WARMUP_TOKENS = 1_500_000
LONG_PHASE_START = 0.5
LONG_PHASE_EVERY = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Decay:
    """
    The end of a run.

    Attributes:
        start: Tokens the run had seen when it was branched off.
        tokens: How many more it sees until its rates are zero.
    """

    start: int
    tokens: int

    def fraction(self, seen: int) -> float:
        """Return how much of the decay is done after ``seen`` tokens, 0 to 1."""
        return min(max((seen - self.start) / self.tokens, 0.0), 1.0)


def rate_factor(seen: int, decay: Decay | None) -> float:
    """
    Return the share of the peak learning rate after ``seen`` tokens.

    It rises linearly over ``WARMUP_TOKENS`` from a hundredth, holds at 1, and falls by the square
    root of the decay's fraction, which loses most of the rate early.
    """
    warm = min(max(seen / WARMUP_TOKENS, 0.01), 1.0)
    return warm if decay is None else warm * (1.0 - decay.fraction(seen) ** 0.5)


def is_long_step(step: int, seen: int, decay: Decay | None) -> bool:
    """Say whether a step uses long windows: every third one in the last half of a decay."""
    if decay is None or decay.fraction(seen) < LONG_PHASE_START:
        return False
    return step % LONG_PHASE_EVERY == 0
