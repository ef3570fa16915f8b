"""The check of every call's credential, on the public and the admin port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog
from google.protobuf.message import Message

from scheduler_svc.config.frontend_security import FrontendSecurity
from scheduler_svc.frontend.calls.rpc_handlers import (
    Context,
    Handler,
    abort,
    behavior_of,
    serve,
    with_behavior,
)
from scheduler_svc.frontend.identity.access import certificate_names, claim, is_open, token_of
from scheduler_svc.frontend.identity.call_shares import PLACED, SHARED, CallShares
from scheduler_svc.frontend.identity.credential_store import CredentialStore, Find
from scheduler_svc.frontend.identity.credential_table import CredentialTable
from scheduler_svc.frontend.identity.identity import Caller, Identity, Role, current_caller
from tandem.bearer_token import token_hash
from tandem.error_codes import PermissionDenied, Unauthenticated
from tandem.errors import InvalidParameter, QueueFull
from tandem.network.tls_files import ServerTls

CLAIMED_BY_ITEM = frozenset({"/tandem.inference.v1.InferenceService/GenerateBatch"})
"""Methods that claim each item of their messages by themselves: one that is refused fails alone."""


@dataclass(frozen=True, slots=True)
class _Proved:
    """Caller of a call, and the function that looks its proof up again."""

    caller: Caller
    find: Find


class IdentityInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not at run time
    """
    Refuses calls without the role of a port, and fills tenant and priority of public requests.

    A token is checked before the request is read: a caller without one costs no memory. It goes
    inside the ErrorInterceptor, which turns refusals into statuses.
    """

    def __init__(
        self,
        credentials: CredentialStore,
        role: Role,
        shares: CallShares,
        *,
        asks_for_certificates: bool,
    ) -> None:
        """
        Args:
            credentials: The credentials in force.
            role: Role that every call of this port needs.
            shares: Calls of each tenant, which must not crowd others out.
            asks_for_certificates: True if clients of this port show certificates.
        """
        self._credentials = credentials
        self._role = role
        self._shares = shares
        self._asks_for_certificates = asks_for_certificates

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap a handler so that it runs only for a caller with the role."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or is_open(method):
            return handler
        try:
            proved = self._of_token(handler_call_details.invocation_metadata)
            if proved is not None:
                self._admit(proved.caller.identity, method)
                self._share(proved.caller, method)
        except QueueFull as error:
            return _turning_away(error)
        except (Unauthenticated, PermissionDenied) as error:
            return _refusing(error)
        if proved is None:
            return with_behavior(handler, self._by_certificate(handler, method), takes_stream=True)
        return with_behavior(handler, self._served(handler, proved, method))

    def _of_token(self, metadata: Any) -> _Proved | None:
        """Return the caller that the token proves; None if only a certificate can prove one."""
        token = token_of(metadata)
        if token is None:
            if self._asks_for_certificates and self._credentials.table().knows_certificates:
                return None
            raise Unauthenticated(
                "this service asks for a credential: send the metadata `authorization: Bearer "
                "TOKEN` with a token from its operators"
            )
        given = token_hash(token)

        def find(table: CredentialTable) -> Caller | None:
            return table.of_hash(given)

        caller = self._credentials.caller(find)
        if caller is None:
            raise Unauthenticated("this service does not know the token in `authorization`")
        return _Proved(caller, find)

    def _of_certificate(self, context: Context) -> _Proved:
        names = certificate_names(context.auth_context())

        def find(table: CredentialTable) -> Caller | None:
            return table.of_certificate(names)

        caller = self._credentials.caller(find)
        if caller is None:
            raise Unauthenticated(
                "this service knows no name of the client certificate: send the metadata "
                "`authorization: Bearer TOKEN`, or have the name entered in its tokens file"
            )
        return _Proved(caller, find)

    def _admit(self, identity: Identity, method: str) -> None:
        """Name the credential in all log lines of the call, and check its role."""
        structlog.contextvars.bind_contextvars(credential=identity.name)
        identity.require(self._role, method)

    def _by_certificate(
        self, handler: Handler, method: str
    ) -> Callable[[Any, Context], Awaitable[object]]:
        """Return a behavior that reads requests only once the certificate has proved a role."""

        async def respond(requests: AsyncIterator[Any], context: Context) -> object:
            proved = self._of_certificate(context)
            self._admit(proved.caller.identity, method)
            self._share(proved.caller, method)
            request = requests if handler.request_streaming else await _only(requests, method)
            return await self._served(handler, proved, method)(request, context)

        return respond

    def _share(self, caller: Caller, method: str) -> None:
        """Count the call among its tenant's until its task ends, or refuse it."""
        if method not in SHARED or caller.is_delegate:
            return
        tenant, task = caller.identity.tenant, asyncio.current_task()
        assert task is not None
        takes_place = method in PLACED
        self._shares.begin(tenant, caller.weight, takes_place=takes_place)
        task.add_done_callback(lambda _: self._shares.end(tenant, takes_place=takes_place))

    def _served(
        self, handler: Handler, proved: _Proved, method: str
    ) -> Callable[[Any, Context], Awaitable[object]]:
        behavior, caller = behavior_of(handler), proved.caller

        async def respond(request: Any, context: Context) -> object:
            current_caller.set(caller)
            if self._role is Role.GENERATE:
                if handler.request_streaming and method not in CLAIMED_BY_ITEM:
                    request = _each_claimed(request, caller.identity)
                elif not handler.request_streaming:
                    claim(request, caller.identity)
            with self._credentials.holding(caller, proved.find, self._role):
                return await serve(behavior, request, context)

        return respond


def open_credentials(
    security: FrontendSecurity, clock: Callable[[], float]
) -> CredentialStore | None:
    """
    Read the file of credentials; None where callers need none.

    Raises:
        InvalidConfig: It cannot be used.
    """
    if security.tokens_file is None:
        return None
    return CredentialStore(Path(security.tokens_file), clock)


def checking(
    credentials: CredentialStore | None, role: Role, shares: CallShares, tls: ServerTls | None
) -> tuple[IdentityInterceptor, ...]:
    """Return the interceptor of a port where every call needs a role; none without credentials."""
    if credentials is None:
        return ()
    asks = tls is not None and tls.requires_client_certificate
    return (IdentityInterceptor(credentials, role, shares, asks_for_certificates=asks),)


async def _each_claimed(
    requests: AsyncIterator[Message], identity: Identity
) -> AsyncIterator[Message]:
    async for request in requests:
        claim(request, identity)
        yield request


async def _only(requests: AsyncIterator[Any], method: str) -> Any:
    async for request in requests:
        return request
    raise InvalidParameter(f"{method} takes one request, and none came", field="")


def _refusing(error: Unauthenticated | PermissionDenied) -> Handler:
    """Return a handler that refuses a call of any kind without reading its request."""

    async def refuse(_requests: object, _context: Context) -> object:
        raise error

    return grpc.stream_stream_rpc_method_handler(refuse)


def _turning_away(error: QueueFull) -> Handler:
    """
    Return a handler that refuses a call of any kind without reading its request, and without a line
    in the log of its own: there may be thousands.
    """

    async def turn_away(_requests: object, context: Context) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(turn_away)
