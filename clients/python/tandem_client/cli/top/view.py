"""Live view of `tandem top` on a terminal, also while the server does not answer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from tandem.error_codes import DeadlineExceeded, TandemError
from tandem.status import CallCancelled, PeerUnavailable
from tandem_client.admin import Stats
from tandem_client.admin.executors import ExecutorSummary
from tandem_client.cli.top.table import duration, table
from tandem_client.streams.retry import is_transient

WINDOW_S = 5.0
"""Number of last seconds that rates cover; they cover one interval if that is longer."""

PATIENCE_S = 2.0
"""Seconds of a server's silence that are not shown yet."""

_NO_ANSWER = (CallCancelled, DeadlineExceeded)
"""Errors of looks that the server did not answer in time."""


class Looks:
    """Snapshots of the last seconds, each with the executors of its moment."""

    def __init__(self, first: Stats, executors: Sequence[ExecutorSummary] = ()) -> None:
        self._kept = deque([(first, executors)])

    @property
    def now(self) -> Stats:
        """Newest snapshot."""
        return self._kept[-1][0]

    @property
    def before(self) -> Stats | None:
        """Snapshot from which rates count; None until there are two of the same server run."""
        return self._kept[0][0] if len(self._kept) > 1 else None

    @property
    def executors(self) -> Sequence[ExecutorSummary]:
        """Executors at the newest snapshot."""
        return self._kept[-1][1]

    @property
    def executors_before(self) -> Sequence[ExecutorSummary]:
        """Executors at the snapshot from which rates count; none without one."""
        return self._kept[0][1] if len(self._kept) > 1 else ()

    def add(self, stats: Stats, executors: Sequence[ExecutorSummary] = ()) -> None:
        """Add a snapshot; drop those that are too old or from before a restart of the server."""
        if stats.uptime_s < self.now.uptime_s:
            self._kept.clear()
        self._kept.append((stats, executors))
        while len(self._kept) > 2 and stats.uptime_s - self._kept[1][0].uptime_s >= WINDOW_S:
            self._kept.popleft()

    def as_table(self, width: int) -> RenderableType:
        """Return the newest snapshot as a table."""
        return table(
            self.now,
            self.before,
            width,
            executors=self.executors,
            executors_before=self.executors_before,
        )


class View:
    """
    The last looks at a server, under a line that says so while it does not answer. The thread that
    draws the view is not the one that asks the server.
    """

    def __init__(
        self, address: str, looks: Looks, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._address = address
        self._looks = looks
        self._clock = clock
        self._asked_s: float | None = None
        """Start of the oldest look without an answer, on the clock; None while there is none."""
        self._error: TandemError | None = None

    def ask(self) -> None:
        """Record that a look begins."""
        if self._asked_s is None:
            self._asked_s = self._clock()

    def answered(self, stats: Stats, executors: Sequence[ExecutorSummary] = ()) -> None:
        """Record the answer."""
        self._looks.add(stats, executors)
        self._asked_s = self._error = None

    def failed(self, error: TandemError) -> None:
        """
        Record that no answer came.

        Raises:
            TandemError: This error, if further looks would fail with it too.
        """
        if not (is_transient(error) or isinstance(error, _NO_ANSWER)):
            raise error
        self._error = error

    def trouble(self) -> str | None:
        """Return a line on the time and reason of a missing answer; None while all is well."""
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
        if error is None or isinstance(error, _NO_ANSWER):
            return f"{self._address} has not answered {since}; still asking; {end}"
        if isinstance(error, PeerUnavailable):
            if error.nothing_listens:
                return (
                    f"nothing listens at {self._address} {since}: the server has ended; still "
                    f"looking for one there; {end}"
                )
            return f"{self._address} cannot be reached {since}; still trying; {end}"
        why = " ".join(error.message.split())
        return f"{self._address} has refused to answer {since}: {why}; still asking; {end}"

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the present state."""
        trouble = self.trouble()
        if trouble is not None:
            yield Text(trouble, style="bold red")
        yield self._looks.as_table(options.max_width)
