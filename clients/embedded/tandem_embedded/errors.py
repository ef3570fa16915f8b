"""The five kinds of error an embedded engine raises, each with the prefix it prints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from tandem.errors import TandemError


class EngineError(Exception):
    """
    Root of what an engine raises or reports; `str()` starts with the kind.

    Attributes:
        message: A sentence that says what was wrong and what to do.
        reason: Name in the table of tandem.errors.
        field: The parameter that was wrong, where there is one.
        retry_after_s: Seconds after which a retry may help, where one can.
    """

    prefix: ClassVar[str] = "Engine error"

    def __init__(
        self,
        message: str,
        *,
        reason: str = "INTERNAL",
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{self.prefix}: {message}")
        self.message = message
        self.reason = reason
        self.field = field
        self.retry_after_s = retry_after_s


class ConfigError(EngineError):
    """Limits, model directory, dtype or device cannot be used."""

    prefix = "Config error"


class EngineMemoryError(EngineError):
    """Weights or KV blocks do not fit, or too many blocks are in use."""

    prefix = "Memory error"


class ValidationError(EngineError):
    """A request or one of its parameters is wrong."""

    prefix = "Validation error"


class ExecutionError(EngineError):
    """Computing failed."""

    prefix = "Execution error"


class SchedulerError(EngineError):
    """A request cannot be taken, found or moved between its states."""

    prefix = "Scheduler error"


_KIND_BY_REASON: dict[str, type[EngineError]] = {
    "INVALID_CONFIG": ConfigError,
    "INVALID_MODEL": ConfigError,
    "INCOMPATIBLE_EXECUTOR": ConfigError,
    "OUT_OF_MEMORY": EngineMemoryError,
    "MEMORY_PRESSURE": EngineMemoryError,
    "INVALID_PARAMETER": ValidationError,
    "EMPTY_PROMPT": ValidationError,
    "PROMPT_TOO_LONG": ValidationError,
    "TOTAL_TOO_LONG": ValidationError,
    "NEVER_FITS": ValidationError,
    "CHAT_TEMPLATE": ValidationError,
    "QUEUE_FULL": SchedulerError,
    "REQUEST_NOT_FOUND": SchedulerError,
    "DUPLICATE_REQUEST_ID": SchedulerError,
    "EVENTS_NOT_TRACKED": SchedulerError,
}


def engine_error(error: TandemError) -> EngineError:
    """The same error in its kind; what is not listed went wrong while computing."""
    kind = _KIND_BY_REASON.get(error.reason, ExecutionError)
    return kind(
        error.message,
        reason=error.reason,
        field=error.field,
        retry_after_s=error.retry_after_s,
    )


@contextmanager
def engine_errors() -> Iterator[None]:
    """Raise what goes wrong within as an error of the engine."""
    try:
        yield
    except TandemError as error:
        raise engine_error(error) from error
