"""The one way in which a consistency check of the core reports what it found."""

from __future__ import annotations

from tandem.errors import InternalError


def require(holds: bool, what_is_wrong: str) -> None:
    """
    Return if an invariant holds.

    Raises:
        InternalError: It does not; the error's text is `what_is_wrong`.
    """
    if not holds:
        raise InternalError(what_is_wrong)
