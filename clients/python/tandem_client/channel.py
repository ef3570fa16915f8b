"""Connections of clients to a server: default addresses, encryption, keep-alive, size limits."""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypedDict, TypeVar

import grpc
import grpc.aio

from tandem.errors import InvalidConfig
from tandem.network.tls_files import client_tls
from tandem.network.tls_pairs import channel_credentials
from tandem_client.request.names import suggests_names
from tandem_client.streams.retry import RetryPolicy
from tandem_client.targets import ROUND_ROBIN, has_several, has_this_machine, takes_turns, target_of
from tandem_client.tracing import TRACEPARENT, checked_traceparent, with_trace

Call = TypeVar("Call")

MetadataSource = (
    Mapping[str, str]
    | Sequence[tuple[str, str]]
    | Callable[[], Mapping[str, str] | Iterable[tuple[str, str]]]
)
"""Metadata of calls, or a function that is asked for it before each call."""

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_ADMIN_ADDRESS = "127.0.0.1:50052"
ADDRESS_VARIABLE = "TANDEM_ADDRESS"
ADMIN_ADDRESS_VARIABLE = "TANDEM_ADMIN_ADDRESS"
API_KEY_VARIABLE = "TANDEM_API_KEY"
_CREDENTIAL = "authorization"
_TOKEN = re.compile(r"[\x21-\x7e]+")


@suggests_names
@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelOptions:
    """
    Settings of one connection.

    Attributes:
        api_key: Token sent with every call as `authorization: Bearer ...`, or a function that
            returns it and is asked before each call; None = that of TANDEM_API_KEY, if it is set.
        ca: File of the certificates that sign servers' certificates; calls are then encrypted.
        cert: File of the certificate to show to servers; calls are then encrypted.
        key: File of its private key.
        server_name: Name in the servers' certificates; None = that of the address.
        credentials: Credentials in place of `ca`, `cert` and `key`, as from
            grpc.ssl_channel_credentials(); None without those = plain text.
        metadata: Pairs sent with every call.
        keepalive_s: Seconds between pings on a silent connection that has calls, which detect a
            dead peer; None = no pings.
        keepalive_timeout_s: Seconds without an answer to a ping after which the connection counts
            as dead.
        max_message_bytes: Size of the largest message accepted.
        extra_options: Channel arguments of gRPC, which win over those that follow from the above.
        interceptors: Client interceptors of gRPC: of grpc for threads, of grpc.aio for asyncio.
    """

    api_key: str | Callable[[], str] | None = field(default=None, repr=False)
    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None
    server_name: str | None = None
    credentials: grpc.ChannelCredentials | None = None
    metadata: tuple[tuple[str, str], ...] = ()
    keepalive_s: float | None = 30.0
    keepalive_timeout_s: float = 10.0
    max_message_bytes: int = 64 << 20
    extra_options: tuple[tuple[str, Any], ...] = ()
    interceptors: tuple[Any, ...] = ()

    @property
    def is_encrypted(self) -> bool:
        """True if calls are encrypted."""
        return any(one is not None for one in (self.ca, self.cert, self.key, self.credentials))

    def grpc_options(self, address: str) -> list[tuple[str, Any]]:
        """
        Return the settings as gRPC channel arguments. The wait before reconnecting grows from 0.1
        to 2 seconds. Calls to several addresses, or to a name as `dns:`, take turns among servers.
        """
        options: list[tuple[str, Any]] = [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.initial_reconnect_backoff_ms", 100),
            # The time limit of one attempt to connect: far or busy servers need this long.
            ("grpc.min_reconnect_backoff_ms", 5000),
            ("grpc.max_reconnect_backoff_ms", 2000),
            # Clients in one process must not share a connection: each has its own flow control.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if has_this_machine(address):
            # A proxy from the environment cannot reach this machine for us.
            options.append(("grpc.enable_http_proxy", 0))
        if self.keepalive_s is not None:
            options += [
                ("grpc.keepalive_time_ms", round(self.keepalive_s * 1000)),
                ("grpc.keepalive_timeout_ms", round(self.keepalive_timeout_s * 1000)),
                # This argument bounds the wait for a ping's answer; its default is a minute.
                ("grpc.http2.ping_timeout_ms", round(self.keepalive_timeout_s * 1000)),
                ("grpc.http2.max_pings_without_data", 0),
            ]
        if takes_turns(address):
            options.append(ROUND_ROBIN)
        if self.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.server_name))
        return [*options, *self.extra_options]

    def call_metadata(self, more: Iterable[tuple[str, str]] = ()) -> list[tuple[str, str]]:
        """
        Return the metadata for one call: ours, then `more`, and the API key unless they have one.

        Raises:
            InvalidConfig: The API key has characters that metadata cannot have.
        """
        pairs = [*self.metadata, *more]
        if any(name.lower() == _CREDENTIAL for name, _ in pairs):
            return pairs
        given = os.environ.get(API_KEY_VARIABLE) if self.api_key is None else self.api_key
        token = given() if callable(given) else given
        if token:
            if not _TOKEN.fullmatch(token):
                raise InvalidConfig("the API key must be printable ASCII without spaces")
            pairs.append((_CREDENTIAL, f"Bearer {token}"))
        return pairs

    def open(self, address: str) -> grpc.Channel:
        """
        Return a channel for threads; it connects with the first call.

        Raises:
            InvalidConfig: `address` is not the address of a server, or a file cannot be used.
        """
        target, options = target_of(address), self.grpc_options(address)
        credentials = self._credentials(address)
        if credentials is None:
            channel = grpc.insecure_channel(target, options=options)
        else:
            channel = grpc.secure_channel(target, credentials, options=options)
        return grpc.intercept_channel(channel, *self.interceptors) if self.interceptors else channel

    def open_async(self, address: str) -> grpc.aio.Channel:
        """Return a channel for the running event loop, as `open` does for threads."""
        target, options = target_of(address), self.grpc_options(address)
        credentials = self._credentials(address)
        if credentials is None:
            return grpc.aio.insecure_channel(
                target, options=options, interceptors=self.interceptors
            )
        return grpc.aio.secure_channel(
            target, credentials, options=options, interceptors=self.interceptors
        )

    def _credentials(self, address: str) -> grpc.ChannelCredentials | None:
        paths = [None if path is None else Path(path) for path in (self.ca, self.cert, self.key)]
        files = client_tls(*paths)
        if files is not None and self.credentials is not None:
            raise InvalidConfig("credentials stand in place of ca, cert and key: give one of both")
        credentials = self.credentials if files is None else channel_credentials(files)
        if credentials is not None and has_several(address) and self.server_name is None:
            raise InvalidConfig(
                f"several addresses ({address}) have no name that their certificates could have: "
                "give server_name"
            )
        return credentials


class Access(TypedDict, total=False):
    """Settings of ChannelOptions that clients take themselves, too; theirs win."""

    api_key: str | Callable[[], str] | None
    ca: str | Path | None
    cert: str | Path | None
    key: str | Path | None
    server_name: str | None


@suggests_names
class BaseConnection:
    """
    Common part of connections for threads and for asyncio.

    Attributes:
        address: Address as it was given; several are joined by commas.
    """

    def __init__(
        self,
        address: str,
        retry: RetryPolicy | None,
        options: ChannelOptions | None,
        access: Access | None = None,
    ) -> None:
        self.address = address
        self._retry = RetryPolicy() if retry is None else retry
        self._options = replace(ChannelOptions() if options is None else options, **access or {})
        self._deadline_s: float | None = None
        self._metadata: tuple[MetadataSource, ...] = ()

    def with_options(
        self,
        *,
        deadline_s: float | None = None,
        retry: RetryPolicy | None = None,
        metadata: MetadataSource | None = None,
        traceparent: str | None = None,
    ) -> Self:
        """
        Return a client with other settings over the same connection, which both use and either one
        closes.

        Args:
            deadline_s: Seconds that a call may take if it does not say so itself; infinity = no
                limit, None = as this client.
            retry: How calls recover by themselves; None = as this client.
            metadata: Pairs that each call sends besides those of this client, or a function that
                returns them and is asked before each call.
            traceparent: Span that calls are part of, as the header of W3C Trace Context; None = the
                current span of OpenTelemetry, where the program uses that, else none.

        Raises:
            InvalidParameter: `traceparent` does not have the form of that header.
        """
        if traceparent is not None:
            other = self.with_options(metadata={TRACEPARENT: checked_traceparent(traceparent)})
            return other.with_options(deadline_s=deadline_s, retry=retry, metadata=metadata)
        other = copy.copy(self)
        other._set(deadline_s, retry, metadata)  # noqa: SLF001  # of the same class
        return other

    def _set(
        self, deadline_s: float | None, retry: RetryPolicy | None, metadata: MetadataSource | None
    ) -> None:
        if deadline_s is not None:
            self._deadline_s = deadline_s
        if retry is not None:
            self._retry = retry
        if metadata is not None:
            self._metadata = (*self._metadata, metadata)

    @property
    def _can_share_streams(self) -> bool:
        """True if many requests may go over one stream: to one server, with the same metadata."""
        return not takes_turns(self.address) and not self._metadata

    def _call(self, method: Callable[..., Call], request: object, timeout_s: float | None) -> Call:
        """Call a method with the metadata of this connection."""
        more: list[tuple[str, str]] = []
        for source in self._metadata:
            found = source() if callable(source) else source
            more += found.items() if isinstance(found, Mapping) else found
        metadata = tuple(with_trace(self._options.call_metadata(more)))
        return method(request, timeout=timeout_s, metadata=metadata)

    def _limit_s(self, limit_s: float | None) -> float | None:
        """Return the seconds that a call may take, by what it says itself; None = for ever."""
        limit_s = self._deadline_s if limit_s is None else limit_s
        return None if limit_s == math.inf else limit_s
