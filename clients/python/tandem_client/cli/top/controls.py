"""State that keys change: the order of requests, the first one shown, pause and help."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

from tandem_client.admin.requests import RequestSummary

ORDERS: dict[str, Callable[[RequestSummary], float] | None] = {
    "phase": None,
    "age": lambda one: one.age_s,
    "prompt": lambda one: one.prompt_tokens,
    "output": lambda one: one.output_tokens,
    "preempted": lambda one: one.preemptions,
}
"""Orders of requests, the largest first; phase is the order of the view."""
HELP = (
    ("q", "leave"),
    ("p, space", "pause the picture, and go on; the server is polled all the same"),
    ("s, right", "sort requests by the next of: " + ", ".join(ORDERS)),
    ("left", "sort by the one before"),
    ("down, up", "show later requests, and earlier ones"),
    ("?, h", "show these keys, and the picture again"),
)


class Controls:
    """
    Choices that keys have made.

    Attributes:
        is_paused: True while the picture stands.
        shows_help: True while the keys are shown in place of the picture.
        is_leaving: True once the command is to end.
    """

    def __init__(self) -> None:
        self.is_paused = self.shows_help = self.is_leaving = False
        self._order = self._first = 0

    @property
    def order(self) -> str:
        """Name of the order of requests."""
        return list(ORDERS)[self._order]

    def press(self, key: str, num_requests: int) -> None:
        """Obey a key while so many requests are listed; others than those of `HELP` do nothing."""
        match key:
            case "q":
                self.is_leaving = True
            case "p" | " ":
                self.is_paused = not self.is_paused
            case "s" | "right":
                self._sort(self._order + 1)
            case "left":
                self._sort(self._order - 1)
            case "down":
                self._first += 1
                self.fit(num_requests)
            case "up":
                self._first = max(0, self._first - 1)
            case "?" | "h":
                self.shows_help = not self.shows_help
            case _:
                pass

    def fit(self, num_requests: int) -> None:
        """Make the first one that is shown one of so many."""
        self._first = min(self._first, max(0, num_requests - 1))

    def shown(self, requests: Sequence[RequestSummary]) -> tuple[RequestSummary, ...]:
        """Return the requests in the chosen order, from the first one that is to be shown."""
        key = ORDERS[self.order]
        ordered = requests if key is None else sorted(requests, key=key, reverse=True)
        return tuple(ordered[self._first :])

    def line(self) -> Text:
        """Return a line on the keys and what they have chosen."""
        words = Text(
            f"q quits, p pauses, s sorts (by {self.order}), ? helps", style="dim", no_wrap=True
        )
        if self._first:
            words.append(f"; from request {self._first + 1}")
        return Text("PAUSED, p goes on; ", style="bold yellow") + words if self.is_paused else words

    def help(self) -> Table:
        """Return the keys and their effects."""
        table = Table("key", "effect", box=None, padding=(0, 2), header_style="bold")
        for key, effect in HELP:
            table.add_row(key, effect)
        return table

    def _sort(self, order: int) -> None:
        self._order, self._first = order % len(ORDERS), 0
