"""
Learning rate as a function of tokens: warm up, hold for as long as needed, then decay.

A run in the hold phase has no planned end and can be stopped and resumed at any time. A decay is a
branch of the run: a copy of the weights is trained on with rates that fall to zero, and exported.
"""

from __future__ import annotations

from dataclasses import dataclass

WARMUP_TOKENS = 400_000
LONG_PHASE_START = 0.5
LONG_PHASE_EVERY = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Decay:
    """
    Decay phase that ends a run.

    Attributes:
        start: Number of tokens that the run had seen when the decay was branched off.
        tokens: Number of further tokens until the rates are zero.
    """

    start: int
    tokens: int

    def fraction(self, seen: int) -> float:
        """Return the share of the decay that is done after ``seen`` tokens, 0 to 1."""
        return min(max((seen - self.start) / self.tokens, 0.0), 1.0)


def rate_factor(seen: int, decay: Decay | None, *, began: int = 0) -> float:
    """
    Return the share of the peak learning rate after ``seen`` tokens.

    The share rises linearly over ``WARMUP_TOKENS`` from a hundredth, holds at 1, and falls by the
    square root of the decay's fraction, so that it loses most of the rate early.

    Args:
        seen: Number of tokens that the weights have seen.
        decay: Decay phase, if one has begun.
        began: Number of tokens that they had seen when the optimizers began without any state.
    """
    warm = min(max((seen - began) / WARMUP_TOKENS, 0.01), 1.0)
    return warm if decay is None else warm * (1.0 - decay.fraction(seen) ** 0.5)


def is_long_step(step: int, seen: int, decay: Decay | None) -> bool:
    """Return True if a step uses long windows: every third step in the last half of a decay."""
    if decay is None or decay.fraction(seen) < LONG_PHASE_START:
        return False
    return step % LONG_PHASE_EVERY == 0
