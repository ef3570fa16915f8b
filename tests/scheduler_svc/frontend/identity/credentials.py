"""Credentials that the tests of this folder have, and the file that a service reads them from."""

from __future__ import annotations

import json
from pathlib import Path

from tandem.bearer_token import token_hash

USER, OTHER, OPERATOR, GATEWAY = "user-token", "other-token", "operator-token", "gateway-token"


def bearer(token: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call with a token; None for a call without one."""
    return () if token is None else (("authorization", f"Bearer {token}"),)


def credentials() -> list[dict[str, object]]:
    return [
        {
            "name": "user",
            "token_sha256": token_hash(USER),
            "certificate": "client.acme.example",
            "tenant": "acme",
        },
        {"name": "other", "token_sha256": token_hash(OTHER), "tenant": "globex"},
        {"name": "operator", "token_sha256": token_hash(OPERATOR), "roles": ["operate"]},
        {
            "name": "gateway",
            "token_sha256": token_hash(GATEWAY),
            "roles": ["generate", "delegate"],
            "highest_priority": -10,
        },
    ]


def write_file(
    folder: Path,
    entries: list[dict[str, object]] | None = None,
    tenants: dict[str, dict[str, object]] | None = None,
) -> Path:
    """Write the credentials as a service reads them, in one step, as operators should."""
    path = folder / "tokens.json"
    partial = folder / "tokens.partial"
    entries = credentials() if entries is None else entries
    partial.write_text(json.dumps({"credentials": entries, "tenants": tenants or {}}))
    return partial.rename(path)
