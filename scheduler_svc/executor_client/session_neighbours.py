"""Interfaces that an executor session uses: the link below it and the session's owner above it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from scheduler_svc.executor_client.connection import ModelInUse
from scheduler_svc.executor_client.description import ExecutorDescription
from scheduler_svc.executor_client.link_events import LinkEvent
from tandem.link.batch import Command, StepResult
from tandem.link.session import LossCause


class Link(Protocol):
    """Part of `link.ExecutorLink` that a session uses."""

    def connect(self, delay_s: float = 0.0, *, elsewhere: bool = False) -> None:
        """Open a session after any number of attempts; `elsewhere` tries the last address last."""

    def seek(self, *, may_move: bool) -> None:
        """
        Look once for the newest session's executor at the other addresses; if it is not found and
        `may_move` is set, open a session with another executor.
        """

    def require(self, model: ModelInUse | None) -> None:
        """Open sessions only with executors of this model from now on."""

    def attach(self, raw_attach: bytes, delay_s: float = 0.0) -> int:
        """Open a step stream; return its number."""

    def send(self, raw_step: bytes) -> None:
        """Queue a message on the newest stream."""

    def break_stream(self) -> None:
        """End the newest stream."""

    def release(self) -> None:
        """End everything, and let another scheduler have the executor."""

    def take_events(self) -> Iterator[LinkEvent]:
        """Yield the events since the last call, in order."""


class SessionOwner(Protocol):
    """Owner of the slots and requests, which the session tells of changes: the core loop."""

    def session_opened(
        self, description: ExecutorDescription, tokenizer_dir: Path, now: float
    ) -> None:
        """Begin a new session with empty slots."""

    def step_done(self, command: Command, result: StepResult, step_s: float, now: float) -> None:
        """
        Apply the next result in order, of this command; `step_s` is the time since its step was
        sent.

        Raises:
            SessionLost: The result is not that of the batch.
        """

    def session_lost(
        self, cause: LossCause, died_in: int | None, may_live: str, now: float
    ) -> None:
        """
        Drop all slots, blocks and steps in flight, which are lost.

        Args:
            cause: Cause of the loss.
            died_in: Index of the step that may be to blame, counted from the oldest in flight; None
                if no step is.
            may_live: Boot id of the executor if it is unknown whether it died, else empty.
            now: The time.
        """

    def executor_seen(self, boot_id: str, *, died: bool, now: float) -> None:
        """Learn whether an executor that was lost with `may_live` has died; no session is open."""
