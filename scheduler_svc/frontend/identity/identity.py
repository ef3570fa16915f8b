"""Identity of a caller: what a credential proves, and what it allows."""

from __future__ import annotations

import enum
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from scheduler_svc.core.request.tenant import DEFAULT_TENANT_LIMITS, TenantLimits
from scheduler_svc.ipc.messages import Submit
from tandem.error_codes import PermissionDenied, Unauthenticated

DEFAULT_HIGHEST_PRIORITY = 0
"""Lowest number that a request may have whose credential says nothing: the default priority."""


class Role(enum.StrEnum):
    """Right of a credential."""

    GENERATE = "generate"
    """Call the public service."""
    OPERATE = "operate"
    """Call the admin service, for requests of all tenants."""
    DELEGATE = "delegate"
    """Name any tenant in requests, as a gateway does that authenticates callers itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """
    Meaning of one credential: its tenant, and its rights.

    Attributes:
        name: Name of the credential, for logs; never a secret.
        tenant: Tenant that it speaks for; empty for none.
        roles: What it may do.
        highest_priority: Lowest `priority` number that its requests may have.
        expires_s: Unix time from which it proves nothing; None for never.
    """

    name: str
    tenant: str
    roles: frozenset[Role]
    highest_priority: int = DEFAULT_HIGHEST_PRIORITY
    expires_s: float | None = None

    def require(self, role: Role, method: str) -> None:
        """
        Check that the credential has a role.

        Raises:
            PermissionDenied: It has not.
        """
        if role not in self.roles:
            raise PermissionDenied(
                f"{method} needs the role {role.value!r}, which the credential {self.name!r} "
                "does not have",
                metadata={"role": role.value},
            )

    def check_not_expired(self, now_s: float) -> None:
        """
        Check that the credential has not expired.

        Args:
            now_s: Unix time now.

        Raises:
            Unauthenticated: It has.
        """
        if self.expires_s is None or now_s < self.expires_s:
            return
        expired = datetime.fromtimestamp(self.expires_s, UTC).isoformat(timespec="seconds")
        raise Unauthenticated(
            f"the credential {self.name!r} expired at {expired}: ask the service's operators for "
            "another",
            metadata={"expired": expired},
        )

    def tenant_for(self, named: str, field: str) -> str:
        """
        Return the tenant of a request that names `named`; the credential's if that is empty.

        Raises:
            PermissionDenied: The request names another tenant than the credential's.
        """
        if not named or named == self.tenant:
            return self.tenant
        if Role.DELEGATE not in self.roles:
            raise PermissionDenied(
                f"the credential {self.name!r} may not speak for another tenant than its own; "
                f"leave {field} unset",
                field=field,
            )
        return named

    def priority_for(self, asked: int | None, field: str) -> int:
        """
        Return the priority of a request; unset is 0, or the credential's highest if that is a
        larger number.

        Raises:
            PermissionDenied: The request asks for a lower number than the credential allows.
        """
        if asked is None:
            return max(0, self.highest_priority)
        if asked < self.highest_priority:
            raise PermissionDenied(
                f"{field} must be at least {self.highest_priority} for the credential "
                f"{self.name!r}, got {asked}; lower numbers go first",
                field=field,
                metadata={"highest_priority": str(self.highest_priority)},
            )
        return asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """
    Caller of one call.

    Attributes:
        identity: What its credential stands for.
        limits: Limits of each tenant that has some of its own, as of the call's beginning.
    """

    identity: Identity
    limits: dict[str, TenantLimits]

    @property
    def is_delegate(self) -> bool:
        """True if its requests name their tenants, which is known only once they are read."""
        return Role.DELEGATE in self.identity.roles

    @property
    def weight(self) -> float:
        """Share of its tenant, relative to those of others."""
        return self.limits.get(self.identity.tenant, DEFAULT_TENANT_LIMITS).weight

    def limits_of(self, tenant: str) -> TenantLimits | None:
        """Return a tenant's own limits; None if it has none."""
        return self.limits.get(tenant)


current_caller: ContextVar[Caller | None] = ContextVar("current_caller", default=None)
"""Caller of the call that this task serves; None where the service asks for no credentials."""


def current_tenant() -> str:
    """Return the tenant of the current caller; empty where it has none."""
    caller = current_caller.get()
    return "" if caller is None else caller.identity.tenant


def with_limits(submit: Submit) -> Submit:
    """Add what the credentials in force allow the request's tenant."""
    caller = current_caller.get()
    limits = None if caller is None else caller.limits_of(submit.tenant)
    return submit if limits is None else msgspec.structs.replace(submit, tenant_limits=limits)
