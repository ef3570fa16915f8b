"""What a reader has counted since its start, and how that of several is added up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

OK = "0"
"""Status of a stream that ended well, as in `ReadCounts.statuses`."""


class ReadCounts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    One report of a reader; all but `time_s` counts since its start.

    Attributes:
        time_s: CLOCK_MONOTONIC seconds.
        cpu_s: CPU time of the reader's own processes.
        streams: That were opened.
        messages: Of every kind.
        deltas: Messages with output.
        tokens: Output tokens in them.
        text_bytes: UTF-8 bytes of their texts.
        bad_offsets: Deltas that do not begin where the choice's last one ended: a token was lost,
            repeated or out of order.
        malformed: Messages that are no GenerateResponse.
        started: Requests that were accepted.
        finished: Choices that ended.
        done: Requests that ended well.
        done_tokens: Output tokens of those by their own count.
        stalled: Streams that were told to stop reading, by the last `stall`.
        stalled_tokens: Output tokens that those got.
        statuses: How many of the other streams ended with a gRPC status; "broken" for none.
        stalled_statuses: The same of the stalled ones.
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
        """Streams that read on and did not end well."""
        return sum(count for status, count in self.statuses.items() if status != OK)

    @property
    def over(self) -> int:
        """Streams that ended, well or not."""
        return sum(self.statuses.values()) + sum(self.stalled_statuses.values())


def added_up(counts: Iterable[ReadCounts]) -> ReadCounts:
    """The sum of at least one report; its time is the last one's."""
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
