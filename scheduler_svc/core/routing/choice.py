"""
Choice of the executor that a request prefers, under the routing policies that have preferences.

    round_robin          each request prefers the next executor, in the order of their numbers
    first_prefix_block   the one that was assigned the prompt's first block last
    longest_prefix       the one with the best score: alpha * the share of the prompt's blocks that
                         it was assigned + (1 - alpha) * the share of its places that are free;
                         among equals the one assigned last, then the one with the lowest number

A prompt without a full block, or of which no executor was assigned anything, goes round robin. With
alpha 1 the prefix alone counts, and all prompts that share one prefer one executor.

Source: Megatron Core's coordinator; its choice without alpha is that with alpha 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scheduler_svc.core.request.options import Routing
from scheduler_svc.core.routing.prefix_table import Match, PrefixTable

_NO_MATCH = Match(0, 0)


class Choice:
    """
    Policy of one cell, with the table that it chooses by.

    Args:
        policy: See `Routing`.
        alpha: Weight of the prefix against free places, under longest_prefix.
    """

    __slots__ = ("_alpha", "_latest", "_policy", "table")

    def __init__(self, policy: Routing, alpha: float) -> None:
        self._policy = policy
        self._alpha = alpha
        self._latest = -1
        """Executor that was chosen last in the round."""
        self.table = PrefixTable()

    def relevant(self, digests: Sequence[bytes]) -> Sequence[bytes]:
        """Return those of a prompt's digests that the policy asks for and notes."""
        match self._policy:
            case Routing.LONGEST_PREFIX:
                return digests
            case Routing.FIRST_PREFIX_BLOCK:
                return digests[:1]
            case _:
                return ()

    def choose(self, digests: Sequence[bytes], free: Mapping[int, float]) -> int:
        """
        Return the executor that a request prefers, and note that it is assigned there.

        Args:
            digests: Those of the full blocks of its prompt, in order.
            free: Share of places that are free, by executor; at least one executor.
        """
        digests = self.relevant(digests)
        found = self.table.matches(digests, free)
        if not found:
            chosen = self._next(free)
        elif self._policy is Routing.FIRST_PREFIX_BLOCK:
            chosen = max(found, key=lambda executor: found[executor].recency)
        else:
            chosen = self._best(len(digests), found, free)
        self.table.assign(digests, chosen)
        return chosen

    def _next(self, free: Mapping[int, float]) -> int:
        later = [executor for executor in free if executor > self._latest]
        self._latest = min(later or free)
        return self._latest

    def _best(self, num_blocks: int, found: Mapping[int, Match], free: Mapping[int, float]) -> int:
        def rank(executor: int) -> tuple[float, int, int]:
            match = found.get(executor, _NO_MATCH)
            score = self._alpha * match.depth / num_blocks + (1 - self._alpha) * free[executor]
            return score, match.recency, -executor

        return max(free, key=rank)
