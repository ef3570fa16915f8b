"""
Results seen of each slot: its output tokens, their number, and the time of the latest.

The result of a decode step has one token for each of the same rows. Writing these into the columns
at once would cost more than everything else about such a result, and most are read only when a
request ends. So results are kept as they came, and written when a column is read, or when there are
`MAX_LATE` of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.invariants import require
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.slots.decode_rows import DecodeRows
from scheduler_svc.core.slots.planned_rows import SlotColumn
from tandem.link.batch import Int32Column

TAIL_LEN = 512
"""Most output tokens a slot collects before they move to its request."""
MAX_LATE = 64
"""Number of unwritten results at which they are written."""

_ROW_LEN = TAIL_LEN + 16  # A power of two would put all rows' ends into the same few cache lines.
_Result: TypeAlias = tuple[DecodeRows, Int32Column, Int32Column, float]


class SlotTokens:
    """
    Columns of shape ``[slots]``, and the latest outputs of each slot; owned by the slot table.

    Attributes:
        tail_start: Number of known tokens that are not in the tail: prompt and `Request.outputs`.
    """

    __slots__ = (
        "_applied",
        "_base",
        "_flat",
        "_known",
        "_last_token_s",
        "_late",
        "_raw",
        "_request_of",
        "tail_start",
    )

    def __init__(self, n: int, request_of: Callable[[int], Request]) -> None:
        """
        Args:
            n: Number of slots.
            request_of: Called with a running slot for its request, to which a full tail is moved.
        """
        self._request_of = request_of
        self._known = np.zeros(n, np.int32)
        self._applied = np.zeros(n, np.int32)
        self._last_token_s = np.zeros(n, np.float64)
        self.tail_start = np.zeros(n, np.int32)
        self._flat = np.zeros(n * _ROW_LEN, np.int32)
        self._raw = self._flat.data.cast("B")
        # Index of a slot's token at position p is p plus this.
        self._base = np.zeros(n, np.int64)
        self._late: list[_Result] = []

    @property
    def known(self) -> Int32Column:
        """Number of tokens known of each slot: prompt and outputs."""
        self._write()
        return self._known

    @property
    def applied(self) -> Int32Column:
        """Number of tokens computed of each slot, as far as results were seen."""
        self._write()
        return self._applied

    @property
    def last_token_s(self) -> NDArray[np.float64]:
        """Time at which the latest token of each slot was seen."""
        self._write()
        return self._last_token_s

    def begin(self, slot: int, request: Request, num_cached: int) -> None:
        """Reset a slot for the request that got it, with `num_cached` positions computed."""
        self._write()
        self._known[slot] = request.num_known
        self._applied[slot] = num_cached
        self._last_token_s[slot] = (
            0.0 if request.times.last_token_s is None else request.times.last_token_s
        )
        self.tail_start[slot] = request.num_known
        self._base[slot] = slot * _ROW_LEN - request.num_known

    def push(self, slots: NDArray[np.intp], position: Int32Column, token: Int32Column) -> None:
        """Append one output token to each of these slots, none twice; all three ``[N]``."""
        self._write()
        self._append(slots, position, token[None])

    def push_decodes(
        self, rows: DecodeRows, position: Int32Column, token: Int32Column, now: float
    ) -> None:
        """
        Append one output token to each of these rows, which all run; both columns ``[R]``.

        All positions before that of the token are computed in each row.
        """
        self._late.append((rows, position, token, now))
        if len(self._late) == MAX_LATE:
            self._write()

    def add_computed(self, slots: SlotColumn, num_tokens: Int32Column) -> None:
        """Count tokens computed in these slots, none twice; both shape ``[N]``."""
        self.applied[slots] += num_tokens

    def note_seen(self, slots: SlotColumn, now: float) -> NDArray[np.float64]:
        """
        Note `now` as the time of the latest token of these slots, none twice, shape ``[N]``;
        returns the seconds since the one before.
        """
        times = self.last_token_s
        gaps = now - times[slots]
        times[slots] = now
        return gaps

    def flush(self, slot: int) -> None:
        """Move a slot's latest tokens to its request."""
        self._write()
        self._flush(np.array([slot], np.intp))

    def tail_len(self, slot: int) -> int:
        """Return the number of tokens in a slot's tail."""
        return int(self.known[slot] - self.tail_start[slot])

    def check_integrity(self) -> None:
        """
        Compare the columns with one another.

        Raises:
            InternalError: The first invariant that does not hold.
        """
        length = self.known - self.tail_start
        require(not (length < 0).any(), "a slot's tail begins behind its tokens")
        require(not (length > TAIL_LEN).any(), "a slot's tail has no room for its tokens")
        began = self._base != 0  # a slot that no request ever had has no tail yet
        is_own = self._base == np.arange(len(length)) * _ROW_LEN - self.tail_start
        require(bool(is_own[began].all()), "a slot's tokens go into another's tail")

    def _write(self) -> None:
        """Write the results kept so far into the columns."""
        if not self._late:
            return
        late, self._late = self._late, []
        by_rows: dict[int, list[_Result]] = {}
        for result in late:
            by_rows.setdefault(id(result[0]), []).append(result)
        # Results of lanes alternate. Where two rows have a slot in common, all steps of the one
        # came before those of the other.
        for results in by_rows.values():
            rows, first, _, _ = results[0]
            _, last, _, now = results[-1]
            tokens = np.concatenate([token for _, _, token, _ in results])
            self._append(rows.slot, first, tokens.reshape(len(results), -1))
            self._applied[rows.slot] = last
            self._last_token_s[rows.slot] = now

    def _append(self, slots: NDArray[np.intp], first: Int32Column, tokens: Int32Column) -> None:
        """Append tokens, shape ``[T, N]``, T at most MAX_LATE, from positions `first` on."""
        count = len(tokens)
        is_full = first + count - self.tail_start[slots] > TAIL_LEN
        if np.count_nonzero(is_full):
            self._flush(slots[is_full])
        # A view of every run of `count` tokens in the flat tails, by its start: the new tokens of a
        # slot fill one such run, and copying them in one piece takes a third of the time.
        size = self._flat.itemsize
        shape = len(self._flat) - count + 1, count
        stretches: Int32Column = np.ndarray(shape, np.int32, self._flat.data, 0, (size, size))
        stretches[self._base[slots] + first] = tokens.T
        self._known[slots] = first + count

    def _flush(self, slots: NDArray[np.intp]) -> None:
        known = self._known[slots]
        start = self._base[slots] + self.tail_start[slots]
        stop = self._base[slots] + known
        places = zip(slots.tolist(), start.tolist(), stop.tolist(), strict=True)
        size = self._flat.itemsize
        for slot, first, end in places:
            self._request_of(slot).append_column(self._raw[size * first : size * end])
        self.tail_start[slots] = known
        self._base[slots] = slots * _ROW_LEN - known
