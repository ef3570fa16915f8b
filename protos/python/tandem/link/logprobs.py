"""Log probabilities of the tokens of a step, as columns over the rows that asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class TokenLogprob(NamedTuple):
    """
    Of one token, natural logarithms.

    Attributes:
        logprob: Of the token itself.
        top_token_ids: Likeliest ids, best first, the lower id first on ties.
        top_logprobs: Theirs.
    """

    logprob: float
    top_token_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True, kw_only=True)
class LogprobColumns:
    """
    One entry per row of a result that asked, natural logarithms of the model's own probabilities.

    Attributes:
        row: int32 ``[Q]``, which entry of the result's columns, ascending.
        chosen: float32 ``[Q]``, of its token.
        top_start: int32 ``[Q + 1]``; row q has the entries ``top_start[q]`` to
            ``top_start[q + 1] - 1`` of the next two.
        top_token: int32 ``[E]``, likeliest ids, best first, the lower id first on ties.
        top: float32 ``[E]``, theirs.
    """

    row: NDArray[np.int32]
    chosen: NDArray[np.float32]
    top_start: NDArray[np.int32]
    top_token: NDArray[np.int32]
    top: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.row)

    def entries(self) -> Iterator[TokenLogprob]:
        """One by one."""
        bounds = self.top_start.tolist()
        tokens, values = self.top_token.tolist(), self.top.tolist()
        for chosen, first, end in zip(self.chosen.tolist(), bounds[:-1], bounds[1:], strict=True):
            yield TokenLogprob(chosen, tokens[first:end], values[first:end])

    def select(self, entries: NDArray[np.intp] | NDArray[np.bool_]) -> LogprobColumns:
        """Some of the entries, by number or by mask ``[Q]``; `row` stays as it is."""
        start, stop = self.top_start[:-1][entries], self.top_start[1:][entries]
        count = stop - start
        ends = np.cumsum(count, dtype=np.int32)
        # Where an entry's run begins here, and so how far each of its places lies from there.
        within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - count, count)
        place = np.repeat(start, count) + within
        return LogprobColumns(
            row=self.row[entries],
            chosen=self.chosen[entries],
            top_start=np.concatenate([np.zeros(1, np.int32), ends]),
            top_token=self.top_token[place],
            top=self.top[place],
        )

    def of_rows(self, kept: NDArray[np.bool_]) -> LogprobColumns:
        """
        The entries of the result's rows that are kept, numbered among those.

        Args:
            kept: bool ``[T]``, one per row of the result.
        """
        found = self.select(kept[self.row])
        found.row = (np.cumsum(kept, dtype=np.int32) - 1)[found.row]
        return found
