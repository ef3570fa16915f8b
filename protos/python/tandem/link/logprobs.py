"""Log probabilities of the tokens of a step, as columns over the rows that asked for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class TokenLogprob(NamedTuple):
    """
    Log probabilities of one token, as natural logarithms.

    Attributes:
        logprob: Log probability of the token itself.
        top_token_ids: Likeliest ids, best first, the lower id first on ties; then those that the
            request named.
        top_logprobs: Log probabilities of these ids.
        rank: Place of the token among all ids, from 1; 0 where it is not told, as for outputs.
    """

    logprob: float
    top_token_ids: list[int]
    top_logprobs: list[float]
    rank: int = 0


@dataclass(slots=True, kw_only=True)
class LogprobColumns:
    """
    Logprobs of a result, one entry per row that asked for them: natural logarithms of the model's
    own probabilities.

    Attributes:
        row: int32 ``[Q]``, index of the entry in the result's columns, ascending.
        chosen: float32 ``[Q]``, log probability of the row's token.
        top_start: int32 ``[Q + 1]``; row q has the entries ``top_start[q]`` to
            ``top_start[q + 1] - 1`` of the next two columns.
        top_token: int32 ``[E]``, likeliest ids, best first, the lower id first on ties.
        top: float32 ``[E]``, log probabilities of these ids.
    """

    row: NDArray[np.int32]
    chosen: NDArray[np.float32]
    top_start: NDArray[np.int32]
    top_token: NDArray[np.int32]
    top: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.row)

    def entries(self) -> Iterator[TokenLogprob]:
        """Yield the entries one by one."""
        bounds = self.top_start.tolist()
        tokens, values = self.top_token.tolist(), self.top.tolist()
        for chosen, first, end in zip(self.chosen.tolist(), bounds[:-1], bounds[1:], strict=True):
            yield TokenLogprob(chosen, tokens[first:end], values[first:end])

    def select(self, entries: NDArray[np.intp] | NDArray[np.bool_]) -> LogprobColumns:
        """Return some of the entries, by index or by mask ``[Q]``, with their `row` unchanged."""
        start, stop = self.top_start[:-1][entries], self.top_start[1:][entries]
        count = stop - start
        ends = np.cumsum(count, dtype=np.int32)
        # Offset of each place of the new columns within the run of its entry.
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
        Return the entries of the result's rows that are kept, with `row` counted among those.

        Args:
            kept: bool ``[T]``, one per row of the result.
        """
        found = self.select(kept[self.row])
        found.row = (np.cumsum(kept, dtype=np.int32) - 1)[found.row]
        return found


@dataclass(slots=True, kw_only=True)
class PromptLogprobColumns:
    """
    Logprobs of the prompt tokens that a step predicted, one entry each; rows in batch order, tokens
    of a row in order.

    Attributes:
        slot: int32 ``[Q]``, slot of the row.
        generation: uint32 ``[Q]``, generation of the request that the slot held.
        position: int32 ``[Q]``, position of the prompt token, at least 1.
        rank: int32 ``[Q]``, its place among all ids by log probability, from 1.
        columns: Its log probability and those of the likeliest ids; `row` counts the entries.
    """

    slot: NDArray[np.int32]
    generation: NDArray[np.uint32]
    position: NDArray[np.int32]
    rank: NDArray[np.int32]
    columns: LogprobColumns

    def __len__(self) -> int:
        return len(self.slot)

    def select(self, entries: NDArray[np.intp] | NDArray[np.bool_]) -> PromptLogprobColumns:
        """Return some of the entries, by index or by mask ``[Q]``."""
        columns = self.columns.select(entries)
        columns.row = np.arange(len(columns.chosen), dtype=np.int32)
        return PromptLogprobColumns(
            slot=self.slot[entries],
            generation=self.generation[entries],
            position=self.position[entries],
            rank=self.rank[entries],
            columns=columns,
        )
