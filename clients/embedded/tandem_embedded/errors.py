"""The five kinds of errors that an embedded engine raises, each with its prefix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

from tandem.errors import TandemError


class EngineError(Exception):
    """
    Base of all errors that an engine raises or reports; `str()` starts with the kind.

    Attributes:
        message: A sentence that says what was wrong and what to do.
        reason: Name in the table of tandem.errors.
        field: Name of the parameter that was wrong; None if no parameter was.
        retry_after_s: Seconds after which a retry may help; None if it cannot.
        metadata: More facts for programs, for example the `limit` that was hit.
    """

    prefix: ClassVar[str] = "Engine error"

    def __init__(
        self,
        message: str,
        *,
        reason: str = "INTERNAL",
        field: str | None = None,
        retry_after_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{self.prefix}: {message}")
        self.message = message
        self.reason = reason
        self.field = field
        self.retry_after_s = retry_after_s
        self.metadata: dict[str, str] = dict(metadata or {})


class ConfigError(EngineError):
    """Error of limits, model directory, dtype or device that cannot be used."""

    prefix = "Config error"


class EngineMemoryError(EngineError):
    """Error of weights or KV blocks that do not fit, or of too many blocks in use."""

    prefix = "Memory error"


class ValidationError(EngineError):
    """Error of a wrong request or parameter."""

    prefix = "Validation error"


class ExecutionError(EngineError):
    """Error of a computation that failed."""

    prefix = "Execution error"


class SchedulerError(EngineError):
    """Error of a request that cannot be accepted, found or moved between states."""

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
    "FEATURE_UNSUPPORTED": ValidationError,
    "MODEL_NOT_FOUND": ValidationError,
    "QUEUE_FULL": SchedulerError,
    "REQUEST_NOT_FOUND": SchedulerError,
    "DUPLICATE_REQUEST_ID": SchedulerError,
    "EVENTS_NOT_TRACKED": SchedulerError,
}


def engine_error(error: TandemError) -> EngineError:
    """
    Convert an error to its kind, with its reason and all that it says.

    A reason that is not listed is one of a step, a session or a profile: an ExecutionError.
    """
    kind = _KIND_BY_REASON.get(error.reason, ExecutionError)
    return kind(
        error.message,
        reason=error.reason,
        field=error.field,
        retry_after_s=error.retry_after_s,
        metadata=error.metadata,
    )


@contextmanager
def engine_errors() -> Iterator[None]:
    """Convert a TandemError raised within to an error of the engine."""
    try:
        yield
    except TandemError as error:
        raise engine_error(error) from error
