"""Tables of events and streams, and the pages that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.events.streams.load import Failure, Outcome

RESULTS = "<!-- results -->\n"
"""Line of a page after which its table of events begins."""
END = "<!-- end -->\n"
"""Line of a page before which a table ends."""
COLUMNS = (
    "In the column of each client stand its streams that ran when the event began, that finished "
    "with the tokens of an undisturbed stream, and that failed."
)
"""Meaning of the columns, for the text before a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """
    One row: an event, and the streams that ran meanwhile.

    Attributes:
        event: The event in words.
        outcomes: What became of the streams of each client.
        problems: All that is not as it has to be, failed streams aside.
        ends_scheduler: True if the scheduler ended, which then counts from 0.
        ends_gateway: True if a gateway ended, which then counts from 0.
    """

    event: str
    outcomes: Mapping[str, Outcome]
    problems: Sequence[str]
    ends_scheduler: bool = False
    ends_gateway: bool = False

    @property
    def failures(self) -> list[Failure]:
        """All streams that failed."""
        return [one for outcome in self.outcomes.values() for one in outcome.failures]

    @property
    def finished(self) -> int:
        """Number of all streams that finished."""
        return sum(one.finished for one in self.outcomes.values())

    @property
    def is_good(self) -> bool:
        """True if nothing failed."""
        return not self.failures and not self.problems

    def __str__(self) -> str:
        cells = [
            f"{one.running}, {one.finished}, {len(one.failures)}" for one in self.outcomes.values()
        ]
        pause_s = max(one.longest_pause_s for one in self.outcomes.values())
        return f"| {self.event} | {' | '.join(cells)} | {pause_s:.1f} s |"


def lines_of(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table with a column for each client."""
    clients = list(rows[0].outcomes)
    return [
        f"| event | {' | '.join(clients)} | longest pause of a stream |",
        f"|---|{'---:|' * (len(clients) + 1)}",
        *(str(row) for row in rows),
    ]


def write_between(page: Path, mark: str, text: str) -> None:
    """
    Write a text into a page between a mark and the next end, in place of the one before.

    Raises:
        ValueError: The page lacks the mark, or an end after it.
    """
    head, found, rest = page.read_text().partition(mark)
    _, found_end, tail = rest.partition(END)
    if not found or not found_end:
        raise ValueError(f"{page} has no {mark.strip()} with {END.strip()} after it")
    page.write_text(f"{head}{mark}\n{text}\n{END}{tail}")
