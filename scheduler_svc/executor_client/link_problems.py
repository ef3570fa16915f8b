"""Warnings about problems with executors, logged once and not at every attempt."""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from scheduler_svc.core.faults.refusals import Refusal
from tandem.errors import OutOfMemory, SessionLost, TandemError
from tandem.link.batch import Batch
from tandem.link.commands import Command
from tandem.link.refusal import RefusedBatch
from tandem.link.results import StepFailed
from tandem.link.session import LossCause

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class LinkProblems:
    """Latest problem by event and address since a stream was attached. Owned by the session."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], str] = {}

    def note(self, event: str, error: TandemError, retry_in_s: float, address: str = "") -> None:
        """Log a problem as a warning, or at debug level if it is known already."""
        problem = f"{error.reason} {error.field}"
        is_known = self._known.get((event, address)) == problem
        self._known[event, address] = problem
        log = _log.debug if is_known else _log.warning
        ours = {"reason": error.reason, "message": error.message, "address": address}
        ours = {name: value for name, value in ours.items() if value}
        taken = {"event", "retry_in_s", *ours}  # The peer's metadata may use these names too.
        theirs = {name: value for name, value in error.metadata.items() if name not in taken}
        log(event, retry_in_s=round(retry_in_s, 3), **ours, **theirs)

    def clear(self) -> None:
        """Forget all problems when a stream is attached: the next ones are warnings again."""
        self._known.clear()


def refusal_of(
    error: TandemError, cause: LossCause, in_flight: Mapping[int, Command], *, is_repeated: bool
) -> Refusal | None:
    """
    Return which batch in flight the executor refused, and log it as our bug; None if it refused
    none.

    Args:
        error: Error that ended the session.
        cause: Cause that it names.
        in_flight: Commands without a result by step id, oldest first.
        is_repeated: Session after session ended before any step succeeded.
    """
    place = RefusedBatch.of(error.metadata) if cause is LossCause.REFUSED else None
    command = None if place is None else in_flight.get(place.step_id)
    if place is None or not isinstance(command, Batch):
        return None
    _log.error(
        "batch_refused",
        problem=error.message,
        step_id=place.step_id,
        slot=place.slot,
        row_slot=command.row_slot.tolist(),
        row_start=command.row_start.tolist(),
        row_num_tokens=command.row_num_tokens.tolist(),
        admitted_slot=[admission.slot for admission in command.admits],
    )
    return Refusal(
        step=place.step_id - next(iter(in_flight)),
        slot=place.slot,
        is_repeated=is_repeated,
        problem=error.message,
    )


def failed_step(step: StepFailed) -> SessionLost:
    """Return the error that ends a session after a step failed as a whole."""
    is_memory = step.reason == OutOfMemory.reason and not step.sticky
    cause = LossCause.OUT_OF_MEMORY if is_memory else LossCause.STEP_FAILED
    text = f"step {step.step_id} failed: {step.reason}: {step.message}"
    return SessionLost(text, metadata=cause.as_metadata())
