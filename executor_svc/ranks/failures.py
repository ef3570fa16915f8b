"""The error that a rank reports before it ends, as the payload of a FAILED frame."""

from __future__ import annotations

from tandem.errors import ERROR_BY_REASON, InternalError, TandemError

_BETWEEN = b"\0"


def encoded_failure(error: Exception) -> bytes:
    """Return the payload for an error."""
    if not isinstance(error, TandemError):
        first_line = str(error).partition("\n")[0]
        error = InternalError(f"{type(error).__name__}: {first_line}")
    return _BETWEEN.join([error.reason.encode(), error.message.encode()])


def decoded_failure(rank: int, payload: bytes) -> TandemError:
    """Return the error that a rank reported, with the rank in its text."""
    reason, _, message = payload.partition(_BETWEEN)
    kind = ERROR_BY_REASON.get(reason.decode(), InternalError)
    return kind(f"rank {rank} of the model: {message.decode()}")
