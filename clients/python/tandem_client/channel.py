"""Connections of clients to a server: default addresses, encryption, keep-alive, size limits."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import grpc
import grpc.aio

from tandem.network.address import check_server_address, names_this_machine
from tandem_client.names import suggests_names
from tandem_client.retry import RetryPolicy

Call = TypeVar("Call")

MetadataSource = (
    Mapping[str, str]
    | Sequence[tuple[str, str]]
    | Callable[[], Mapping[str, str] | Iterable[tuple[str, str]]]
)
"""Metadata of calls, or a function that is asked for it before each call."""

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_ADMIN_ADDRESS = "127.0.0.1:50052"


@suggests_names
@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelOptions:
    """
    Settings of one connection.

    Attributes:
        credentials: Credentials from grpc.ssl_channel_credentials(); None = plain text.
        metadata: Pairs sent with every call, for example (("authorization", "Bearer ..."),).
        keepalive_s: Seconds between pings on a silent connection that has calls, which detect a
            dead peer; None = no pings.
        keepalive_timeout_s: Seconds without an answer to a ping after which the connection counts
            as dead.
        max_message_bytes: Size of the largest message accepted.
    """

    credentials: grpc.ChannelCredentials | None = None
    metadata: tuple[tuple[str, str], ...] = ()
    keepalive_s: float | None = 30.0
    keepalive_timeout_s: float = 10.0
    max_message_bytes: int = 64 << 20

    def grpc_options(self, address: str) -> list[tuple[str, int]]:
        """
        Return the settings as gRPC channel arguments. The wait before reconnecting grows from 0.1
        to 2 seconds.
        """
        options = [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.initial_reconnect_backoff_ms", 100),
            # The time limit of one attempt to connect: far or busy servers need this long.
            ("grpc.min_reconnect_backoff_ms", 5000),
            ("grpc.max_reconnect_backoff_ms", 2000),
            # Clients in one process must not share a connection: each has its own flow control.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if names_this_machine(address):
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
        return options

    def open(self, address: str) -> grpc.Channel:
        """
        Return a channel for threads; it connects with the first call.

        Raises:
            InvalidConfig: `address` is not the address of a server.
        """
        check_server_address(address)
        if self.credentials is None:
            return grpc.insecure_channel(address, options=self.grpc_options(address))
        return grpc.secure_channel(address, self.credentials, options=self.grpc_options(address))

    def open_async(self, address: str) -> grpc.aio.Channel:
        """Return a channel for the running event loop, as `open` does for threads."""
        check_server_address(address)
        if self.credentials is None:
            return grpc.aio.insecure_channel(address, options=self.grpc_options(address))
        return grpc.aio.secure_channel(
            address, self.credentials, options=self.grpc_options(address)
        )


@suggests_names
class BaseConnection:
    """
    Common part of connections for threads and for asyncio.

    Attributes:
        address: Address as it was given.
    """

    def __init__(
        self, address: str, retry: RetryPolicy | None, options: ChannelOptions | None
    ) -> None:
        self.address = check_server_address(address)
        self._retry = RetryPolicy() if retry is None else retry
        self._options = ChannelOptions() if options is None else options
        self._deadline_s: float | None = None
        self._metadata: tuple[MetadataSource, ...] = ()

    def with_options(
        self,
        *,
        deadline_s: float | None = None,
        retry: RetryPolicy | None = None,
        metadata: MetadataSource | None = None,
    ) -> Self:
        """
        Return a client with other settings over the same connection, which both use and either one
        closes.

        Args:
            deadline_s: Seconds that a call may take if it does not say so itself; infinity = no
                limit, None = as this client.
            retry: How calls recover by themselves; None = as this client.
            metadata: Pairs that each call sends besides those of this client, or a function that
                returns them and is asked before each call, as for `traceparent`.
        """
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

    def _call(self, method: Callable[..., Call], request: object, timeout_s: float | None) -> Call:
        """Call a method with the metadata of this connection."""
        pairs = list(self._options.metadata)
        for source in self._metadata:
            found = source() if callable(source) else source
            pairs += found.items() if isinstance(found, Mapping) else found
        return method(request, timeout=timeout_s, metadata=tuple(pairs))

    def _limit_s(self, limit_s: float | None) -> float | None:
        """Return the seconds that a call may take, by what it says itself; None = for ever."""
        limit_s = self._deadline_s if limit_s is None else limit_s
        return None if limit_s == math.inf else limit_s
