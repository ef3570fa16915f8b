"""Connections to executors."""

from __future__ import annotations

import grpc

from scheduler_svc.executor_client.link_events import LONGEST_BACKOFF_S
from tandem.executor.v1.executor_service_pb2_grpc import ExecutorServiceStub
from tandem.link.wire import MAX_MESSAGE_BYTES

CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    # How long one attempt to connect may take, however early in the back-off: a busy peer needs it.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", int(LONGEST_BACKOFF_S * 1000)),
    # A node that vanished closes nothing: only an unanswered ping ends its connection. What bounds
    # the wait for the answer is the ping's own timeout, a minute unless set.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),
    # The link is private: a proxy that the environment names for the outside cannot carry it.
    ("grpc.enable_http_proxy", 0),
    # Another channel to the same address is another connection: the old one may be dead unnoticed.
    ("grpc.use_local_subchannel_pool", 1),
)


def open_channel(address: str) -> grpc.Channel:
    """A connection of its own to HOST:PORT or unix:PATH; it connects with the first call."""
    return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)


def stub_on(channel: grpc.Channel) -> ExecutorServiceStub:
    """The calls that executors answer."""
    return ExecutorServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code
