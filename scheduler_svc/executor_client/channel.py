"""gRPC channels to executors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc
import grpc.aio
import structlog

from scheduler_svc.executor_client.link_events import LONGEST_BACKOFF_S
from tandem.executor.v1.executor_service_pb2_grpc import ExecutorServiceStub
from tandem.link.codec.wire import MAX_MESSAGE_BYTES
from tandem.network.address import names_this_machine
from tandem.network.link_security import check_executors
from tandem.network.link_token import LinkToken
from tandem.network.tls import ClientCredentials
from tandem.network.tls_files import ClientTls

_EXPECTED_HOST = "grpc.ssl_target_name_override"
"""Option for the name that the server's certificate must have, where it is not the address."""
CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    # One attempt to connect may take this long, also early in the back-off: a busy peer needs it.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", int(LONGEST_BACKOFF_S * 1000)),
    # A node that vanished closes no connection: only an unanswered ping does. The wait for the
    # answer is bounded by the ping's own timeout, which is a minute unless it is set.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),
    # The link is private: a proxy that the environment names for other hosts cannot carry it.
    ("grpc.enable_http_proxy", 0),
    # Each channel has its own connection: an old one to the same address may be dead unnoticed.
    ("grpc.use_local_subchannel_pool", 1),
)


_LACKS = {
    (False, False): "prompts and outputs cross the network unencrypted, and the executor serves "
    "every caller",
    (False, True): "prompts, outputs and the token cross the network unencrypted",
    (True, False): "nothing proves to the executor that calls come from this scheduler",
}
"""Security that a link lacks, by whether it is encrypted and whether it is authenticated."""

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class ExecutorAccess:
    """
    Way to executors: opens channels, and has the metadata that calls must carry. Files that have
    changed are used by the next channel and the next call. Any thread may use it.
    """

    def __init__(self, tls: ClientTls | None = None, token_file: Path | None = None) -> None:
        """
        Args:
            tls: Files to connect with; None for plain text.
            token_file: File of the token that executors ask for; None for none.

        Raises:
            InvalidConfig: One of the files cannot be used.
        """
        self._is_encrypted = tls is not None
        self._is_authenticated = token_file is not None or (
            tls is not None and tls.certificate is not None
        )
        self._credentials = None if tls is None else ClientCredentials(tls)
        self._token = None if token_file is None else LinkToken(token_file)
        self._hosts: dict[str, str] = {}
        """Host under which an address was found, by address."""

    def know(self, hosts: Mapping[str, str]) -> None:
        """
        Expect the certificate of each of these addresses to be that of the host under which it was
        looked up, as certificates name no addresses of pods.
        """
        self._hosts = {**self._hosts, **hosts}  # one that a name means no longer may still serve

    def open(self, address: str) -> grpc.Channel:
        """Return a channel with its own connection to HOST:PORT or unix:PATH; a call opens it."""
        if self._credentials is None:
            return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        return grpc.secure_channel(address, self._credentials.get(), options=self._options(address))

    def open_async(self, address: str) -> grpc.aio.Channel:
        """Return a channel for the running event loop, as `open` does for threads."""
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(
            address, self._credentials.get(), options=self._options(address)
        )

    def _options(self, address: str) -> tuple[tuple[str, int | str], ...]:
        host = self._hosts.get(address)
        return CHANNEL_OPTIONS if host is None else (*CHANNEL_OPTIONS, (_EXPECTED_HOST, host))

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata for the next call."""
        return () if self._token is None else self._token.metadata()

    def check(self, addresses: Sequence[str], *, insecure_link: bool) -> None:
        """
        Check that calls to these addresses prove who calls wherever they leave this machine.

        Raises:
            InvalidConfig: They do not, and `insecure_link` does not allow that.
        """
        check_executors(
            addresses, is_authenticated=self._is_authenticated, insecure_link=insecure_link
        )

    def warn_where_unprotected(self, addresses: Sequence[str]) -> None:
        """Log a warning for each address of another machine that is called without protection."""
        if self._is_encrypted and self._is_authenticated:
            return
        for address in addresses:
            if not names_this_machine(address):
                _log.warning(
                    "executor_link_unprotected",
                    address=address,
                    message=f"{_LACKS[self._is_encrypted, self._is_authenticated]}: keep this "
                    "network to machines you trust, or set executor_ca with executor_cert or "
                    "link_token_file here, and the executor's tls_cert, tls_key and tls_client_ca "
                    "or link_token_file",
                )


def stub_on(channel: grpc.Channel) -> ExecutorServiceStub:
    """Return the stub for an executor's calls."""
    return ExecutorServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code
