"""Turns of tenants: the next calls to begin, and those that wait while the loop is late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from scheduler_svc.frontend.calls.rpc_handlers import Context
from scheduler_svc.frontend.identity.access import certificate_names, token_of
from scheduler_svc.frontend.identity.call_shares import PLACED, CallShares
from scheduler_svc.frontend.identity.call_window import CallWindow
from scheduler_svc.frontend.identity.credential_store import CredentialStore
from scheduler_svc.frontend.identity.identity import Caller
from tandem.bearer_token import token_hash
from tandem.error_codes import Unauthenticated

TIMER_S = 0.005
"""Seconds from one timer that tells how late the loop is to the next, while calls are held."""


@dataclass(frozen=True, slots=True)
class _Tenant:
    """One that takes turns: a tenant, or the delegates that speak for it and for others."""

    name: str
    weight: float
    is_delegate: bool


class OpenGate:
    """Gate of a port that asks for no credentials: connections take turns, and none waits."""

    def caller_of(self, context: Context) -> Hashable:
        """Return the client's end of the connection."""
        return context.peer()

    def may_begin(self, _caller: Hashable, _method: str) -> bool:
        """Return True."""
        return True

    def notify(self, changed: Callable[[], None]) -> None:
        """Do nothing: no caller ever waits."""


class TenantGate:
    """
    Gate of a port with credentials. Owned by the event loop.

    Tenants take turns. All callers that no credential is known of are one, however many tokens they
    make up. A tenant whose calls are less than half its share of those that are being served begins
    one at once; others may be held back for it by a `CallWindow`: calls that take a place in the
    core by the number of those, and the short ones that take none by theirs, as they would wait
    minutes for long outputs otherwise. Delegates never are: the tenants
    of their requests are known only once these are read.
    """

    def __init__(
        self, credentials: CredentialStore, shares: CallShares, window: CallWindow
    ) -> None:
        self._credentials = credentials
        self._shares = shares
        self._window = window
        self._has_held = False
        """True if a call was held back since the last timer."""
        self._to_notify: set[Callable[[], None]] = set()

    def caller_of(self, context: Context) -> Hashable:
        """Return the tenant of a call; None for a credential that is unknown, or none."""
        caller = self._credential_of(context)
        if caller is None:
            return None
        return _Tenant(caller.identity.tenant, caller.weight, caller.is_delegate)

    def _credential_of(self, context: Context) -> Caller | None:
        table = self._credentials.table()
        try:
            token = token_of(tuple(context.invocation_metadata() or ()))
        except Unauthenticated:
            return None
        if token is not None:
            return table.of_hash(token_hash(token))
        if table.knows_certificates:
            return table.of_certificate(certificate_names(context.auth_context()))
        return None

    def may_begin(self, caller: Hashable, method: str) -> bool:
        """Return False while the tenant has to wait; the call that begins is not counted here."""
        if not isinstance(caller, _Tenant) or caller.is_delegate:
            return True
        takes_place = method in PLACED
        if self._shares.has_few(caller.name, caller.weight, takes_place=takes_place):
            self._window.guard(caller.name)
            return True
        num_alike = self._shares.num_alike(takes_place=takes_place)
        if self._window.is_open(caller.name, num_alike):
            return True
        self._has_held = True
        return False

    def notify(self, changed: Callable[[], None]) -> None:
        """Call `changed` at the next timer."""
        if not self._to_notify:
            loop = asyncio.get_running_loop()
            due_s = loop.time() + TIMER_S
            loop.call_at(due_s, lambda: self._on_timer(loop.time() - due_s))
        self._to_notify.add(changed)

    def _on_timer(self, late_s: float) -> None:
        if self._has_held:
            self._window.note_timer(late_s)
        self._has_held = False
        waiting, self._to_notify = self._to_notify, set()
        for changed in waiting:
            changed()


def call_gate(
    credentials: CredentialStore | None,
    shares: CallShares,
    max_calls: int,
    clock: Callable[[], float],
) -> OpenGate | TenantGate:
    """Return the gate of a port; see `CallWindow` for the arguments."""
    if credentials is None:
        return OpenGate()
    return TenantGate(credentials, shares, CallWindow(max_calls, clock))
