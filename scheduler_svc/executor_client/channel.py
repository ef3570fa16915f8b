"""gRPC channels to executors."""

from __future__ import annotations

import grpc

from scheduler_svc.executor_client.link_events import LONGEST_BACKOFF_S
from tandem.executor.v1.executor_service_pb2_grpc import ExecutorServiceStub
from tandem.link.codec.wire import MAX_MESSAGE_BYTES

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


def open_channel(address: str) -> grpc.Channel:
    """Return a channel with its own connection to HOST:PORT or unix:PATH; a call opens it."""
    return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)


def stub_on(channel: grpc.Channel) -> ExecutorServiceStub:
    """Return the stub for an executor's calls."""
    return ExecutorServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code
