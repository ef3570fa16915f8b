"""Token ids that may end a running request: one lookup per step instead of one per request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.invariants import require
from tandem.link.batch import Int32Column

MAX_END_ID = (1 << 24) - 1
"""Largest id that can end a request: it bounds the table, and no vocabulary comes near it."""


class EndIds:
    """Number of running requests that end at each token id."""

    __slots__ = ("_counts", "_is_end")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        # The last entry stays False: ids past the table are looked up there.
        self._is_end = np.zeros(1, np.bool_)

    def add(self, ids: Iterable[int]) -> None:
        """Count a request's end ids, each in 0 to MAX_END_ID."""
        for token in ids:
            if token >= len(self._is_end) - 1:
                grown = np.zeros(2 * token + 2, np.bool_)
                grown[: len(self._is_end)] = self._is_end
                self._is_end = grown
            count = self._counts.get(token, 0)
            self._counts[token] = count + 1
            if not count:
                self._is_end[token] = True

    def remove(self, ids: Iterable[int]) -> None:
        """Stop counting a request's end ids."""
        for token in ids:
            count = self._counts[token] - 1
            if count:
                self._counts[token] = count
            else:
                del self._counts[token]
                self._is_end[token] = False

    def check_integrity(self, running: Iterable[Iterable[int]]) -> None:
        """
        Compare the counts with the end ids of the running requests.

        Raises:
            InternalError: An id is counted that ends none of them, or the other way round.
        """
        counts = Counter(token for ids in running for token in ids)
        require(counts == self._counts, "end ids are not those of the running requests")
        ends = np.flatnonzero(self._is_end).tolist()
        require(sorted(counts) == ends, "the table of end ids differs from their counts")

    def may_end(self, tokens: Int32Column) -> NDArray[np.bool_]:
        """Return for each token True if it ends any running request; shape of `tokens`."""
        # numpy looks up by its own index type five times faster than by any other.
        return self._is_end.take(tokens.astype(np.intp), mode="clip")
