"""What `tandem top` shows on a terminal, also while the server does not answer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from tandem.errors import TandemError
from tandem.status import CallCancelled, PeerUnavailable
from tandem_client.admin import Stats
from tandem_client.cli.top_table import duration, table
from tandem_client.retry import is_transient

WINDOW_S = 5.0
"""Rates are of this many last seconds, or of one interval where that is longer."""

PATIENCE_S = 2.0
"""Silence of a server that is no news yet."""

_NOTHING_LISTENS = ("refused", "No such file")


class Looks:
    """Snapshots of the last seconds."""

    def __init__(self, first: Stats) -> None:
        self._kept = deque([first])

    @property
    def now(self) -> Stats:
        """The newest snapshot."""
        return self._kept[-1]

    @property
    def before(self) -> Stats | None:
        """The one that rates count from; None until there are two of the same server."""
        return self._kept[0] if len(self._kept) > 1 else None

    def add(self, stats: Stats) -> None:
        """Take a new snapshot, and forget what is too old or of a server that was restarted."""
        if stats.uptime_s < self.now.uptime_s:
            self._kept.clear()
        self._kept.append(stats)
        while len(self._kept) > 2 and stats.uptime_s - self._kept[1].uptime_s >= WINDOW_S:
            self._kept.popleft()


class View:
    """
    The last looks at a server, under a line that says so while it does not answer. It is drawn by
    another thread than the one that asks.
    """

    def __init__(
        self, address: str, looks: Looks, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._address = address
        self._looks = looks
        self._clock = clock
        self._asked_s: float | None = None
        """When the oldest look began that has no answer; None while there is none."""
        self._error: TandemError | None = None

    def ask(self) -> None:
        """Take note that a look begins."""
        if self._asked_s is None:
            self._asked_s = self._clock()

    def answered(self, stats: Stats) -> None:
        """Take the answer."""
        self._looks.add(stats)
        self._asked_s = self._error = None

    def failed(self, error: TandemError) -> None:
        """
        Take note that no answer came.

        Raises:
            TandemError: This error, which no further look would mend.
        """
        if not (is_transient(error) or isinstance(error, CallCancelled)):
            raise error
        self._error = error

    def trouble(self) -> str | None:
        """Say since when and why there is no answer; None while all is well."""
        asked_s = self._asked_s
        if asked_s is None:
            return None
        silent_s = self._clock() - asked_s
        error = self._error
        if error is None and silent_s < PATIENCE_S:
            return None
        clock = time.strftime("%H:%M:%S", time.localtime(time.time() - silent_s))
        since = f"since {clock} ({duration(silent_s)})"
        end = "what stands below is of then; Ctrl-C leaves"
        if error is None or isinstance(error, CallCancelled):
            return f"{self._address} has not answered {since}; still asking; {end}"
        if isinstance(error, PeerUnavailable):
            if any(words in error.message for words in _NOTHING_LISTENS):
                return (
                    f"nothing listens at {self._address} {since}: the server has ended; still "
                    f"looking for one there; {end}"
                )
            return f"{self._address} cannot be reached {since}; still trying; {end}"
        why = " ".join(error.message.split())
        return f"{self._address} has refused to answer {since}: {why}; still asking; {end}"

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it as it is now."""
        trouble = self.trouble()
        if trouble is not None:
            yield Text(trouble, style="bold red")
        yield table(self._looks.now, self._looks.before, options.max_width)
