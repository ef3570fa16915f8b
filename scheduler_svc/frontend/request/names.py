"""Checks of names that clients choose and operators read on terminals and in logs."""

from __future__ import annotations

from tandem.errors import InvalidParameter

MAX_REQUEST_ID_CHARS = 128
MAX_TENANT_CHARS = 128
MAX_IDEMPOTENCY_KEY_CHARS = 128


def check_name(text: str, *, field: str, at_least: int, at_most: int) -> None:
    """
    Check length and characters of a name; a space is printable, control characters and invisible
    marks of Unicode are not.

    Raises:
        InvalidParameter: The name breaks a rule; the error has the field.
    """
    if not at_least <= len(text) <= at_most:
        how_many = f"{at_least} to {at_most}" if at_least else f"at most {at_most}"
        raise InvalidParameter(
            f"{field} must have {how_many} characters, got {len(text)}.", field=field
        )
    if not text.isprintable():
        at, char = next((at, char) for at, char in enumerate(text) if not char.isprintable())
        raise InvalidParameter(
            f"{field} must have printable characters only, got {char!a} at {at}.", field=field
        )


def check_request_id(request_id: str) -> None:
    """
    Check the id of one request.

    Raises:
        InvalidParameter: No request can have this id.
    """
    check_name(request_id, field="request_id", at_least=1, at_most=MAX_REQUEST_ID_CHARS)


def check_tenant(tenant: str) -> None:
    """
    Check the name of a tenant; an empty one means no tenant.

    Raises:
        InvalidParameter: No tenant can have this name.
    """
    check_name(tenant, field="tenant", at_least=0, at_most=MAX_TENANT_CHARS)
