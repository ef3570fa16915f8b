"""Frontend processes: their start by exec, their settings, watch and end."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import structlog

from scheduler_svc.process.frontend_settings import FrontendSettings

STOP_DEADLINE_S = 5.0
"""Seconds that a frontend may take to close its streams after it was asked to stop."""

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Frontend:
    """
    One frontend process.

    It exits when its stdin ends, so it cannot outlive this process, however this one ends. It is in
    its own process group: an interrupt typed at the terminal reaches only the core process, which
    then stops the frontends in an orderly way.
    """

    def __init__(self, settings: FrontendSettings, on_exit: Callable[[int, int], None]) -> None:
        """
        Start the process.

        Args:
            settings: Settings of the frontend.
            on_exit: Called once, on another thread, with its index and exit code.
        """
        self.index = settings.index
        self._process = subprocess.Popen(  # noqa: S603  # our own program, arguments from settings
            [
                sys.executable,
                "-m",
                "scheduler_svc.frontend",
                "--settings-json",
                msgspec.json.encode(settings).decode(),
            ],
            stdin=subprocess.PIPE,
            process_group=0,
        )
        self._watcher = threading.Thread(
            target=self._watch, args=(on_exit,), name=f"frontend-{self.index}", daemon=True
        )
        self._watcher.start()
        _log.info("frontend_started", frontend=self.index, pid=self._process.pid)

    def _watch(self, on_exit: Callable[[int, int], None]) -> None:
        on_exit(self.index, self._process.wait())

    def ask_to_stop(self) -> None:
        """Close its stdin, which asks it to finish what it is sending and stop."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill the process at once."""
        self._process.kill()

    def stop_by(self, deadline_s: float) -> None:
        """Wait for the process to end until this time (monotonic seconds), then kill it."""
        self._watcher.join(timeout=max(0.0, deadline_s - time.monotonic()))
        if self._watcher.is_alive():
            _log.warning("frontend_killed", frontend=self.index)
            self._process.kill()
            self._watcher.join()


def stop_frontends(frontends: list[Frontend]) -> None:
    """Stop all frontends together: ask first, kill those that still run after the deadline."""
    for frontend in frontends:
        frontend.ask_to_stop()
    deadline_s = time.monotonic() + STOP_DEADLINE_S
    for frontend in frontends:
        frontend.stop_by(deadline_s)
