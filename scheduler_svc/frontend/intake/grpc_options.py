"""Options of a frontend's gRPC servers."""

from __future__ import annotations

from scheduler_svc.process.frontend_settings import FrontendSettings

MAX_PENDING_CALLS = 1 << 16
"""
Most calls that have arrived and wait for the event loop. By default gRPC begins to cancel calls at
1,000, without a reason that a client could read; the core refuses those over its limit with one.
"""
MAX_PENDING_S = 3600
"""Most seconds that a call waits so; after 30 gRPC would cancel it, again without a reason."""
MAX_METADATA_BYTES = 8 << 10
"""Most bytes of a call's metadata; gRPC itself refuses more."""


def server_options(settings: FrontendSettings) -> tuple[tuple[str, int], ...]:
    """Return the options of the public server and of the operators'."""
    return (
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.so_reuseport", int(settings.share_port)),
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        ("grpc.server_max_unrequested_time_in_server", MAX_PENDING_S),
        ("grpc.max_concurrent_streams", settings.max_streams_per_connection),
        # Else gRPC counts calls that are over for their client until this process has let go of
        # them, and refuses others for them with REFUSED_STREAM: UNAVAILABLE without a reason.
        ("grpc.http.overload_protection", 0),
        # Clients behind balancers ping often. A silent client is pinged, so that one that
        # vanished is noticed and its requests end.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        # The wait for a ping's answer is bounded by this option, which is a minute unless set.
        ("grpc.http2.ping_timeout_ms", 20_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        *_connection_age(settings),
    )


def _connection_age(settings: FrontendSettings) -> tuple[tuple[str, int], ...]:
    if settings.max_connection_age_s is None:
        return ()
    return (
        ("grpc.max_connection_age_ms", int(settings.max_connection_age_s * 1000)),
        ("grpc.max_connection_age_grace_ms", int(settings.max_connection_age_grace_s * 1000)),
    )
