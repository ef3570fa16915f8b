"""
The file of credentials: which tokens and certificates a service knows, and limits of tenants.

It is TOML, or JSON of the same shape if its name ends in .json; `deploy/security.md` has an
example. It has hashes of tokens in place of tokens, so that a reader of it cannot call the service.
"""

from __future__ import annotations

import json
import re
import tomllib
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec

from scheduler_svc.core.request.tenant import TenantLimits
from scheduler_svc.frontend.identity.credential_table import CredentialTable
from scheduler_svc.frontend.identity.identity import DEFAULT_HIGHEST_PRIORITY, Identity, Role
from tandem.errors import InvalidConfig

MAX_NAME_CHARS = 128
_HASH = re.compile(r"[0-9a-f]{64}")
_MIN_PRIORITY, _MAX_PRIORITY = -(2**31), 2**31 - 1


class _TenantEntry(msgspec.Struct, forbid_unknown_fields=True):
    """Limits of one tenant, all its credentials together; see TenantLimits."""

    max_requests: int | None = None
    max_queued_tokens: int | None = None
    tokens_per_minute: int | None = None
    weight: float = 1.0


class _CredentialEntry(msgspec.Struct, forbid_unknown_fields=True):
    """One credential: a token, a certificate, or both."""

    name: str
    tenant: str = ""
    roles: tuple[Role, ...] = (Role.GENERATE,)
    highest_priority: int = DEFAULT_HIGHEST_PRIORITY
    expires: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    """Time from which it proves nothing."""
    token_sha256: str | None = None
    certificate: str | None = None
    """Common name, or a subject alternative name, of the client certificate."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    credentials: tuple[_CredentialEntry, ...]
    tenants: dict[str, _TenantEntry] = {}


def read_credentials(path: Path) -> CredentialTable:
    """
    Read and check a file of credentials.

    Raises:
        InvalidConfig: It cannot be read, or something in it is wrong; the text says where.
    """
    try:
        file = msgspec.convert(_decoded(path), _File)
        return _table(file)
    except msgspec.ValidationError as error:
        raise InvalidConfig(f"the tokens file {path}: {error}") from error
    except InvalidConfig as error:
        raise InvalidConfig(f"the tokens file {path}: {error.message}") from error


def _decoded(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidConfig(f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidConfig("is no UTF-8 text") from error
    try:
        return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:  # of which both decoders' errors are kinds
        raise InvalidConfig(f"cannot be decoded: {error}") from error


def _table(file: _File) -> CredentialTable:
    limits = {name: _limits(name, entry) for name, entry in file.tenants.items()}
    by_hash: dict[str, Identity] = {}
    by_certificate: dict[str, Identity] = {}
    names: set[str] = set()
    for entry in file.credentials:
        _check_name("the name of a credential", entry.name)
        if entry.name in names:
            raise InvalidConfig(f"two credentials have the name {entry.name!r}")
        names.add(entry.name)
        try:
            identity = _identity(entry)
            _add(by_hash, entry.token_sha256, identity, "token_sha256")
            _add(by_certificate, entry.certificate, identity, "certificate")
        except InvalidConfig as error:
            raise InvalidConfig(f"credential {entry.name!r}: {error.message}") from error
    return CredentialTable(by_hash=by_hash, by_certificate=by_certificate, limits=limits)


def _limits(name: str, entry: _TenantEntry) -> TenantLimits:
    _check_name("the name of a tenant", name)
    limits = TenantLimits(**msgspec.structs.asdict(entry))
    try:
        limits.validate()
    except InvalidConfig as error:
        raise InvalidConfig(f"tenant {name!r}: {error.message}") from error
    return limits


def _identity(entry: _CredentialEntry) -> Identity:
    if entry.token_sha256 is None and entry.certificate is None:
        raise InvalidConfig("needs token_sha256, certificate or both")
    if entry.token_sha256 is not None and not _HASH.fullmatch(entry.token_sha256):
        raise InvalidConfig(
            "token_sha256 must be 64 hexadecimal digits in lower case, as `tandem token` prints"
        )
    if entry.certificate is not None:
        _check_name("certificate", entry.certificate)
    if not entry.roles:
        raise InvalidConfig("roles must not be empty")
    speaks_for_one = Role.GENERATE in entry.roles and Role.DELEGATE not in entry.roles
    if entry.tenant or speaks_for_one:
        _check_name("tenant", entry.tenant)
    if not _MIN_PRIORITY <= entry.highest_priority <= _MAX_PRIORITY:
        raise InvalidConfig("highest_priority must be a number of 32 bits")
    return Identity(
        name=entry.name,
        tenant=entry.tenant,
        roles=frozenset(entry.roles),
        highest_priority=entry.highest_priority,
        expires_s=None if entry.expires is None else entry.expires.timestamp(),
    )


def _add(found: dict[str, Identity], key: str | None, identity: Identity, what: str) -> None:
    if key is None:
        return
    if key in found:
        raise InvalidConfig(f"{what} is that of {found[key].name!r} too")
    found[key] = identity


def _check_name(what: str, name: str) -> None:
    if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise InvalidConfig(f"{what} must have 1 to {MAX_NAME_CHARS} printable characters")
