"""Whom an executor session deals with: the link below it, and above it who owns what it loses."""

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
    """What a session needs of `executor_link.ExecutorLink`."""

    def connect(self, delay_s: float = 0.0, *, elsewhere: bool = False) -> None:
        """Open a session, however many attempts it takes; with `elsewhere` first at another's."""

    def seek(self, *, may_move: bool) -> None:
        """
        Look once for the newest session's executor at its other addresses, and if `may_move` open
        a session with another one where it is not found.
        """

    def require(self, model: ModelInUse | None) -> None:
        """Open sessions only with executors of this model from now on."""

    def attach(self, raw_attach: bytes, delay_s: float = 0.0) -> int:
        """Open a step stream; gives its number."""

    def send(self, raw_step: bytes) -> None:
        """Queue a message on the newest stream."""

    def break_stream(self) -> None:
        """End the newest stream."""

    def release(self) -> None:
        """End all, and let another scheduler have the executor."""

    def take_events(self) -> Iterator[LinkEvent]:
        """What happened since the last call."""


class SessionOwner(Protocol):
    """Who is told what happens to slots and requests: the loop."""

    def session_opened(
        self, description: ExecutorDescription, tokenizer_dir: Path, now: float
    ) -> None:
        """A new session begins with empty slots."""

    def step_done(self, command: Command, result: StepResult, step_s: float, now: float) -> None:
        """
        The next result in order, of this command; `step_s` is the time since its step was sent.

        Raises:
            SessionLost: The result is not that of the batch.
        """

    def session_lost(
        self, cause: LossCause, died_in: int | None, may_live: str, now: float
    ) -> None:
        """
        All slots, blocks and steps in flight are gone; `died_in` counts from the oldest of these to
        the one that may be to blame, None where none is; `may_live` is the boot id of an executor
        of which nobody knows whether it died.
        """

    def executor_seen(self, boot_id: str, *, died: bool, now: float) -> None:
        """It is known now whether an executor that was lost so has died; no session is open."""
