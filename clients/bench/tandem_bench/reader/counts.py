"""Counts of a reader since its start, and their sum over several readers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

OK = "0"
"""Status of a stream that ended well, as in `ReadCounts.statuses`."""


class ReadCounts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    One report of a reader; all values but `time_s` are totals since its start.

    Attributes:
        time_s: CLOCK_MONOTONIC seconds.
        cpu_s: CPU seconds of the reader's own processes.
        streams: Streams that were opened.
        messages: Messages of every kind.
        deltas: Messages with output.
        tokens: Output tokens in these deltas.
        text_bytes: UTF-8 bytes of the deltas' texts.
        bad_offsets: Deltas that do not begin where the choice's last one ended: a token was lost,
            repeated or out of order.
        malformed: Messages that are no GenerateResponse.
        started: Requests that were accepted.
        finished: Choices that ended.
        done: Requests that ended well.
        done_tokens: Output tokens of these requests by the server's count.
        stalled: Streams that the last `stall` told to stop reading.
        stalled_tokens: Output tokens that the stalled streams got.
        statuses: Number of the other streams that ended, by gRPC status; "broken" stands for
            streams that ended without one.
        stalled_statuses: The same for the stalled streams.
    """

    time_s: float
    cpu_s: float
    streams: int
    messages: int = 0
    deltas: int = 0
    tokens: int = 0
    text_bytes: int = 0
    bad_offsets: int = 0
    malformed: int = 0
    started: int = 0
    finished: int = 0
    done: int = 0
    done_tokens: int = 0
    stalled: int = 0
    stalled_tokens: int = 0
    statuses: Mapping[str, int] = {}
    stalled_statuses: Mapping[str, int] = {}

    @property
    def failed(self) -> int:
        """Number of streams that were not stalled and did not end well."""
        return sum(count for status, count in self.statuses.items() if status != OK)

    @property
    def over(self) -> int:
        """Number of streams that ended, well or not."""
        return sum(self.statuses.values()) + sum(self.stalled_statuses.values())


def added_up(counts: Iterable[ReadCounts]) -> ReadCounts:
    """Add up at least one report; the time of the sum is the latest one."""
    parts = list(counts)
    sums = {
        name: sum(getattr(part, name) for part in parts)
        for name in ReadCounts.__struct_fields__
        if name not in ("time_s", "statuses", "stalled_statuses")
    }
    return ReadCounts(
        time_s=max(part.time_s for part in parts),
        statuses=_joined(part.statuses for part in parts),
        stalled_statuses=_joined(part.stalled_statuses for part in parts),
        **sums,
    )


def _joined(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    joined: Counter[str] = Counter()
    for one in counts:
        joined.update(one)
    return dict(joined)
