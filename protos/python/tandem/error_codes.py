"""
Roots of all errors that a caller may see: one class for each gRPC code.

Every reason is a class of its own below the class of its code (`errors.py`). An error whose reason
is not known here, such as one of a newer server or of a proxy, has the class of its code still, so
that a caller who matches these classes acts as the code asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class TandemError(Exception):
    """
    Root of all errors that a caller may see.

    Attributes:
        message: A sentence that says what was wrong and what to do.
        field: Path of the wrong request field, or None.
        retry_after_s: Seconds after which a retry may help; None if the error gives no such time.
        metadata: More facts for programs, for example the limit that was hit.
        request_id: Id of the failed request, as the server's log has it; empty if none was told.
    """

    reason: ClassVar[str] = "INTERNAL"
    code: ClassVar[str] = "INTERNAL"
    default_retry_after_s: ClassVar[float | None] = None

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
        request_id: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = self.default_retry_after_s if retry_after_s is None else retry_after_s
        self.metadata: dict[str, str] = dict(metadata or {})
        self.request_id = request_id


class InvalidArgument(TandemError):
    """The request itself is wrong; unchanged, it fails again."""

    reason = code = "INVALID_ARGUMENT"


class OutOfRange(TandemError):
    """A value is past what is there."""

    reason = code = "OUT_OF_RANGE"


class NotFound(TandemError):
    """The call names something that is not there."""

    reason = code = "NOT_FOUND"


class AlreadyExists(TandemError):
    """The call would make something that is there already."""

    reason = code = "ALREADY_EXISTS"


class FailedPrecondition(TandemError):
    """The server cannot do this in its present state."""

    reason = code = "FAILED_PRECONDITION"


class Unimplemented(TandemError):
    """The server does not have this method."""

    reason = code = "UNIMPLEMENTED"


class Unauthenticated(TandemError):
    """The call carries no credential that the server knows."""

    reason = code = "UNAUTHENTICATED"


class PermissionDenied(TandemError):
    """The credential is known and may not do this."""

    reason = code = "PERMISSION_DENIED"


class ResourceExhausted(TandemError):
    """The server, or a limit on the caller, has no room now."""

    reason = code = "RESOURCE_EXHAUSTED"


class Unavailable(TandemError):
    """The server cannot serve now."""

    reason = code = "UNAVAILABLE"


class Aborted(TandemError):
    """The call was broken off; a larger unit of work has to begin again."""

    reason = code = "ABORTED"


class DataLoss(TandemError):
    """Data was lost or changed."""

    reason = code = "DATA_LOSS"


class Internal(TandemError):
    """The server, or a proxy on the way, has a fault."""

    reason = code = "INTERNAL"


class Unknown(TandemError):
    """The call failed, and the peer said no more than that."""

    reason = code = "UNKNOWN"


class Cancelled(TandemError):
    """The call was cancelled."""

    reason = code = "CANCELLED"


class DeadlineExceeded(TandemError, TimeoutError):
    """The deadline of the call passed."""

    reason = code = "DEADLINE_EXCEEDED"


ERROR_BY_CODE: dict[str, type[TandemError]] = {
    error.code: error for error in TandemError.__subclasses__()
}
"""Base classes by gRPC code: one for each code but OK, of which every class of a reason is one."""
