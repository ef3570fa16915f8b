"""Live view of `tandem top` on a terminal, also while the server does not answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from tandem.error_codes import DeadlineExceeded, TandemError
from tandem.status import CallCancelled, PeerUnavailable
from tandem_client.cli.top.controls import Controls
from tandem_client.cli.top.table import table
from tandem_client.cli.top.words import duration
from tandem_client.streams.retry import is_transient
from tandem_client.views.history import SnapshotHistory
from tandem_client.views.model import view_of
from tandem_client.views.snapshot import Snapshot

PATIENCE_S = 2.0
"""Seconds of a server's silence that are not shown yet."""

_NO_ANSWER = (CallCancelled, DeadlineExceeded)
"""Errors of snapshots that the server did not answer in time."""


class View:
    """
    The last snapshots of a server, under a line that says so while it does not answer. The thread
    that draws the view is not the one that asks the server.
    """

    def __init__(
        self,
        address: str,
        history: SnapshotHistory,
        clock: Callable[[], float] = time.monotonic,
        controls: Controls | None = None,
    ) -> None:
        """
        Args:
            address: Address of the server.
            history: The snapshots of it so far.
            clock: Seconds.
            controls: What keys have chosen; None where there are no keys.
        """
        self._controls = controls
        self._address = address
        self._history = history
        self._shown = view_of(history)
        """View that is drawn; a whole new one takes its place, so that no half of one is drawn."""
        self._clock = clock
        self._asked_s: float | None = None
        """Start of the oldest unanswered snapshot, on the clock; None while there is none."""
        self._error: TandemError | None = None

    def ask(self) -> None:
        """Record that a snapshot begins."""
        if self._asked_s is None:
            self._asked_s = self._clock()

    def answered(self, snapshot: Snapshot) -> None:
        """Record the answer."""
        self._history.add(snapshot)
        self._asked_s = self._error = None
        self._show_newest()

    def press(self, key: str) -> None:
        """Obey a key; the picture that goes on after a pause is of the newest snapshot."""
        if self._controls is not None:
            self._controls.press(key, len(self._shown.requests))
            self._show_newest()

    def failed(self, error: TandemError) -> None:
        """
        Record that no answer came.

        Raises:
            TandemError: This error, if further snapshots would fail with it too.
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
        end = "the values below are from then; Ctrl-C quits"
        if error is None or isinstance(error, _NO_ANSWER):
            return f"{self._address} has not answered {since}; still asking; {end}"
        if isinstance(error, PeerUnavailable):
            if error.nothing_listens:
                return (
                    f"nothing listens at {self._address} {since}: the server has ended; still "
                    f"looking for one there; {end}"
                )
            return f"{self._address} cannot be reached {since}; reconnecting; {end}"
        why = " ".join(error.message.split())
        return f"{self._address} has refused to answer {since}: {why}; still asking; {end}"

    def _show_newest(self) -> None:
        """Draw the newest snapshot from now on, unless there is a pause."""
        controls = self._controls
        if controls is not None and controls.is_paused:
            return
        newest = view_of(self._history)
        if controls is not None:
            # Before it is drawn: of fewer requests the first one to be shown would not be there.
            controls.fit(len(newest.requests))
        self._shown = newest

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the present state."""
        trouble = self.trouble()
        if trouble is not None:
            yield Text(trouble, style="bold red")
        shown, height, controls = self._shown, console.height, self._controls
        if controls is not None:
            yield controls.line()
            if controls.shows_help:
                yield controls.help()
                return
            shown, height = replace(shown, requests=controls.shown(shown.requests)), height - 1
        yield table(shown, options.max_width, height=height, ascii_only=options.ascii_only)
