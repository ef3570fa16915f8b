"""
The rule by which two runs of the same request count as equal.

Matrix libraries round differently for different batch shapes. Where the winning token leads by less
than that noise, two right runs may differ in it and in every token after it. Two runs are equal
when they agree at every position before the first one with a margin under eps. Log probabilities of
these positions are equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import pytest

from tandem.link.logprobs import TokenLogprob

EPS_FLOAT32 = 1e-4
LOGPROB_NOISE = 1e-3
"""
Noise between two ways of computing the same float32 logits, over a few hundred terms of a sum.
"""
MIN_SHARE_COMPARED = 0.75
"""
Minimum of the median of compared tokens, as a share of those of an output; below it an equality
test would say little.
"""


def compared_length(margins: Sequence[float], eps: float = EPS_FLOAT32) -> int:
    """Return how many leading tokens must agree: those before the first margin under eps."""
    for position, margin in enumerate(margins):
        if margin < eps:
            return position
    return len(margins)


def assert_same_logprobs(
    expected: Sequence[TokenLogprob], found: Sequence[TokenLogprob], margins: Sequence[float]
) -> None:
    """
    Check log probabilities, where there are any: those of the leading tokens that must agree up to
    rounding. Ids that nearly tie may change places.

    Args:
        expected: Log probabilities of each token, or none.
        found: As many.
        margins: Margin of each token that was expected.
    """
    assert len(expected) == len(found)
    length = compared_length(margins)
    for first, second in zip(expected[:length], found[:length], strict=True):
        assert second.logprob == pytest.approx(first.logprob, abs=LOGPROB_NOISE)
        assert second.top_logprobs == pytest.approx(first.top_logprobs, abs=LOGPROB_NOISE)
        assert len(second.top_token_ids) == len(first.top_token_ids)


@dataclass(slots=True)
class Comparison:
    """Comparisons of one test, and the check that they compared enough tokens."""

    compared: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def check(
        self,
        expected: Sequence[int],
        found: Sequence[int],
        margins: Sequence[float],
        what: str,
    ) -> None:
        """Assert that `found` equals `expected`, which has these margins."""
        assert len(expected) == len(margins)
        length = compared_length(margins)
        self.compared.append(length)
        self.lengths.append(len(expected))
        assert len(expected) == len(found), what
        assert list(expected[:length]) == list(found[:length]), what

    def assert_not_vacuous(self) -> None:
        """Assert that the median comparison covered most of its tokens."""
        needed = MIN_SHARE_COMPARED * median(self.lengths)
        assert median(self.compared) >= needed > 0, self.compared
