"""Settings that the core process gives a frontend at its start, as one JSON argument."""

from __future__ import annotations

import msgspec

from scheduler_svc.config.frontend_security import FrontendSecurity
from scheduler_svc.process.tick_watch import LIVE_WITHIN_S
from tandem.engine_config import EngineConfig


class FrontendSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    Settings of one frontend process.

    Attributes:
        index: Number of this frontend, from 0; its identity on the core's socket.
        ipc_path: Unix path of the core's ROUTER socket.
        listen: host:port of the public service; port 0 takes any free one.
        admin_listen: host:port of the admin service; None on all frontends but one.
        metrics_listen: host:port of the Prometheus page; None on all frontends but one.
        local_listen: unix:PATH of the socket for the program that started the service; None on all
            frontends but one.
        share_port: True when other frontends listen on the same port; else a port in use is an
            error.
        log_level: "debug", "info", "warning" or "error".
        log_format: "json" or "console".
        max_message_bytes: Largest request message accepted.
        undecoded_share: Most of the bytes that wait to be decoded that one connection may have.
        max_streams_per_connection: Most calls at a time on one connection; clients hold back more.
        max_num_seqs: Most requests in the core, of which each tenant has a share.
        max_connection_age_s: Age, in seconds, at which a connection takes no more calls; None for
            no limit.
        max_connection_age_grace_s: Seconds that its calls may go on then.
        drain_grace_s: Seconds that `Drain` waits where the call does not say.
        progress_interval_s: Longest silence of a stream, in seconds, before a Progress is repeated.
        stall_deadline_s: Most seconds that a message may wait for a client that does not read.
        max_pending_bytes: Most output of one request that may wait for its client.
        core_timeout_s: Age of the core's last answer, in seconds, at which liveness fails.
        query_timeout_s: Seconds in which the core must answer a query, beyond a grace asked for.
        num_tokenizer_threads: Threads for long prompts and chat templates.
        max_waiting_prompts: Most prompts that may wait for one of these threads.
        scores_prompts: The core accepts requests for log probabilities of their prompts.
        security: Encryption and identity of all ports but the local socket.
        executor_ca: File of the CAs of executors' certificates, for profiles; None for plain text.
        executor_cert: File of the certificate to show to executors.
        executor_key: File of its key.
        link_token_file: File of the token to send to executors.
        otlp_endpoint: URL of the collector of spans; None for that of OpenTelemetry's variables.
    """

    index: int
    ipc_path: str
    listen: str
    admin_listen: str | None = None
    metrics_listen: str | None = None
    local_listen: str | None = None
    share_port: bool = False
    log_level: str = "info"
    log_format: str = "console"
    max_message_bytes: int = 4 * 1024 * 1024
    undecoded_share: float = 0.667
    max_streams_per_connection: int = 1024
    max_num_seqs: int = EngineConfig().max_num_seqs
    max_connection_age_s: float | None = None
    max_connection_age_grace_s: float = 600.0
    drain_grace_s: float = 30.0
    progress_interval_s: float = 3.0
    stall_deadline_s: float = 60.0
    max_pending_bytes: int = 1024 * 1024
    core_timeout_s: float = LIVE_WITHIN_S
    query_timeout_s: float = 10.0
    num_tokenizer_threads: int = 2
    max_waiting_prompts: int = 256
    scores_prompts: bool = True
    security: FrontendSecurity = FrontendSecurity()
    executor_ca: str | None = None
    executor_cert: str | None = None
    executor_key: str | None = None
    link_token_file: str | None = None
    otlp_endpoint: str | None = None


def parse_settings(argument: str) -> FrontendSettings:
    """
    Decode the `--settings-json` argument.

    Raises:
        msgspec.ValidationError: A missing, unknown or mistyped setting; the text names it.
    """
    return msgspec.json.decode(argument, type=FrontendSettings)
