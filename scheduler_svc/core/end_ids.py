"""Which token ids may end somebody: one lookup per step instead of one per request."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tandem.link.batch import Int32Column

MAX_END_ID = (1 << 24) - 1
"""Largest id that can end a request: bounds the table, and no vocabulary comes near."""


class EndIds:
    """How many running requests end at each token id."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        # The last entry stays 0: ids past the table are looked up there.
        self._counts = np.zeros(1, np.int32)

    def add(self, ids: Iterable[int]) -> None:
        """Count a request's end ids, each in 0 to MAX_END_ID."""
        for token in ids:
            if token >= len(self._counts) - 1:
                grown = np.zeros(2 * token + 2, np.int32)
                grown[: len(self._counts)] = self._counts
                self._counts = grown
            self._counts[token] += 1

    def remove(self, ids: Iterable[int]) -> None:
        """Stop counting a request's end ids."""
        for token in ids:
            self._counts[token] -= 1

    def may_end(self, tokens: Int32Column) -> NDArray[np.bool_]:
        """Whether each token ends somebody, not necessarily its own request; shape of `tokens`."""
        ends: NDArray[np.bool_] = self._counts.take(tokens, mode="clip") > 0
        return ends
