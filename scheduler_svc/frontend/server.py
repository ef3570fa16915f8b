"""Servers of one frontend: public, admin, metrics and the local socket."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler_svc.executor_client.channel import ExecutorAccess
from scheduler_svc.frontend.calls.batches import DELAY_S
from scheduler_svc.frontend.calls.interceptor import ErrorInterceptor
from scheduler_svc.frontend.calls.refusal_lines import RefusalLines
from scheduler_svc.frontend.calls.screened_server import CallGate, screened_server
from scheduler_svc.frontend.core_client import CoreClient
from scheduler_svc.frontend.health import HealthServicer, publish_health
from scheduler_svc.frontend.identity.call_gate import OpenGate, call_gate
from scheduler_svc.frontend.identity.call_shares import SHARED, CallShares
from scheduler_svc.frontend.identity.identity import Role
from scheduler_svc.frontend.identity.interceptor import (
    checking,
    open_credentials,
)
from scheduler_svc.frontend.inference import InferenceServicer
from scheduler_svc.frontend.intake.decoding import MessageIntake
from scheduler_svc.frontend.intake.grpc_options import server_options
from scheduler_svc.frontend.operators.admin import AdminServicer
from scheduler_svc.frontend.operators.metrics_http import METRICS_TOKENS, serve_metrics
from scheduler_svc.frontend.operators.scaler import ScalerServicer
from scheduler_svc.frontend.text.tokenizer_threads import TokenizerThreads
from scheduler_svc.process.frontend_settings import FrontendSettings
from tandem.admin.v1 import admin_service_pb2, admin_service_pb2_grpc
from tandem.errors import AddressInUse
from tandem.inference.v1 import inference_service_pb2, inference_service_pb2_grpc
from tandem.keda.v1 import external_scaler_service_pb2, external_scaler_service_pb2_grpc
from tandem.network.address import host_and_port, is_unix, without_brackets
from tandem.network.reflection import serve_reflection
from tandem.network.tls import server_credentials
from tandem.network.tls_contexts import server_context
from tandem.network.tls_files import ServerTls, client_tls
from tandem.network.token_file import TokenFile

if TYPE_CHECKING:
    from scheduler_svc.frontend.tracing.request_spans import RequestTracer

INFERENCE = inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
ADMIN = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
SCALER = external_scaler_service_pb2.DESCRIPTOR.services_by_name["ExternalScaler"].full_name
BATCH_BUFFERS = 16
"""Output of a whole batch that may wait for its client, in buffers of one request."""
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


@dataclass(slots=True, kw_only=True)
class FrontendServers:
    """Listening servers, their addresses with port 0 resolved, and the failures of their calls."""

    address: str
    admin_address: str | None
    metrics_address: str | None
    public: grpc.aio.Server
    admin: grpc.aio.Server | None
    local: grpc.aio.Server | None
    metrics: asyncio.Server | None
    threads: TokenizerThreads
    refusals: RefusalLines

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, end calls that last over `grace_s` seconds, and close all servers."""
        if self.metrics is not None:
            self.metrics.close()
        opened = (self.public, self.admin, self.local)
        servers = [server for server in opened if server is not None]
        await asyncio.gather(*(server.stop(grace_s) for server in servers))
        await asyncio.sleep(2 * DELAY_S)  # handlers that this has ended are cancelled by then
        self.threads.close()


async def start_servers(
    settings: FrontendSettings,
    core: CoreClient,
    clock: Callable[[], float],
    tracer: RequestTracer | None = None,
) -> FrontendServers:
    """
    Listen on every address of the settings.

    Raises:
        AddressInUse: One of them cannot be bound.
        InvalidConfig: One of them is not host:port, or a file of their security cannot be used.
    """
    refusals = RefusalLines()
    errors = ErrorInterceptor(MessageIntake(connection_share=settings.undecoded_share), refusals)
    health = HealthServicer()
    publish_health(core, health, (INFERENCE, ADMIN, SCALER))
    threads = _tokenizer_threads(settings)
    security = settings.security
    public_tls, admin_tls = security.public_tls(), security.admin_tls()
    credentials = open_credentials(security, clock)
    shares = CallShares(settings.max_num_seqs, clock)
    inference = _inference(
        settings, core, threads, clock, shares=shares, refusals=refusals, tracer=tracer
    )
    operators = _operators(settings, core)
    gate = call_gate(credentials, shares, settings.max_num_seqs, clock)
    checks = checking(credentials, Role.GENERATE, shares, public_tls)
    public = _server(settings, health, (INFERENCE,), (errors, *checks), gate)
    _add_inference(inference, public)
    address = _bind(public, settings.listen, public_tls)

    admin: grpc.aio.Server | None = None
    admin_address = None
    if settings.admin_listen is not None:
        checks = checking(credentials, Role.OPERATE, shares, admin_tls)
        admin = _server(settings, health, (ADMIN, SCALER), (errors, *checks), gate)
        _add_operators(operators, admin)
        admin_address = _bind(admin, settings.admin_listen, admin_tls)

    local = _local_server(settings, health, errors, inference, operators)
    metrics, metrics_address = await _listen_metrics(settings, core, tracer)

    await asyncio.gather(*(one.start() for one in (public, admin, local) if one is not None))
    return FrontendServers(
        address=address,
        admin_address=admin_address,
        metrics_address=metrics_address,
        public=public,
        admin=admin,
        local=local,
        metrics=metrics,
        threads=threads,
        refusals=refusals,
    )


def _local_server(
    settings: FrontendSettings,
    health: HealthServicer,
    errors: ErrorInterceptor,
    inference: InferenceServicer,
    operators: tuple[AdminServicer, ScalerServicer],
) -> grpc.aio.Server | None:
    if settings.local_listen is None:
        return None
    server = _server(settings, health, (INFERENCE, ADMIN, SCALER), (errors,), OpenGate())
    _add_inference(inference, server)
    _add_operators(operators, server)
    _bind_locally(server, settings.local_listen)
    return server


def _tokenizer_threads(settings: FrontendSettings) -> TokenizerThreads:
    return TokenizerThreads(
        settings.num_tokenizer_threads, max_waiting=settings.max_waiting_prompts
    )


def _inference(
    settings: FrontendSettings,
    core: CoreClient,
    threads: TokenizerThreads,
    clock: Callable[[], float],
    *,
    shares: CallShares,
    refusals: RefusalLines,
    tracer: RequestTracer | None,
) -> InferenceServicer:
    return InferenceServicer(
        core,
        threads,
        clock,
        max_request_bytes=settings.max_message_bytes,
        max_items=settings.max_streams_per_connection,
        shares=shares,
        refusals=refusals,
        max_pending_bytes=BATCH_BUFFERS * settings.max_pending_bytes,
        scores_prompts=settings.scores_prompts,
        tracer=tracer,
    )


def _server(
    settings: FrontendSettings,
    health: HealthServicer,
    services: tuple[str, ...],
    interceptors: Sequence[grpc.aio.ServerInterceptor],  # type: ignore[type-arg]  # not at run time
    gate: CallGate,
) -> grpc.aio.Server:
    server = screened_server(interceptors, server_options(settings), gate, SHARED)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    serve_reflection(server, (*services, HEALTH))
    return server


def _add_inference(servicer: InferenceServicer, server: grpc.aio.Server) -> None:
    inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(  # type: ignore[no-untyped-call]  # generated
        servicer, server
    )


def _operators(
    settings: FrontendSettings, core: CoreClient
) -> tuple[AdminServicer, ScalerServicer]:
    access = _executor_access(settings)
    operation = AdminServicer(core, access, drain_grace_s=settings.drain_grace_s)
    return operation, ScalerServicer(core)


def _add_operators(
    servicers: tuple[AdminServicer, ScalerServicer], server: grpc.aio.Server
) -> None:
    operation, scaler = servicers
    admin_service_pb2_grpc.add_AdminServiceServicer_to_server(  # type: ignore[no-untyped-call]  # generated
        operation, server
    )
    external_scaler_service_pb2_grpc.add_ExternalScalerServicer_to_server(  # type: ignore[no-untyped-call]  # generated
        scaler, server
    )


def _executor_access(settings: FrontendSettings) -> ExecutorAccess:
    paths = (settings.executor_ca, settings.executor_cert, settings.executor_key)
    token_file = settings.link_token_file
    return ExecutorAccess(
        client_tls(*(None if path is None else Path(path) for path in paths)),
        None if token_file is None else Path(token_file),
    )


def _bind(server: grpc.aio.Server, listen: str, tls: ServerTls | None) -> str:
    try:
        if tls is None:
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, server_credentials(tls))
    except RuntimeError as error:
        raise _address_in_use(listen) from error
    if port == 0:
        raise _address_in_use(listen)
    return listen if is_unix(listen) else f"{host_and_port(listen)[0]}:{port}"


def _bind_locally(server: grpc.aio.Server, address: str) -> None:
    """Listen on a unix socket that this process's user alone can open."""
    # Processes of other users could connect before a chmod that follows the bind.
    before = os.umask(0o177)
    try:
        _bind(server, address, None)
    finally:
        os.umask(before)


async def _listen_metrics(
    settings: FrontendSettings, core: CoreClient, tracer: RequestTracer | None
) -> tuple[asyncio.Server | None, str | None]:
    listen, security = settings.metrics_listen, settings.security
    if listen is None:
        return None, None
    host, port = host_and_port(listen)
    files, token_file = security.metrics_tls(), security.metrics_token_file
    tls = None if files is None else server_context(files)
    tokens = None if token_file is None else TokenFile(Path(token_file), METRICS_TOKENS)
    try:
        server = await serve_metrics(
            core,
            without_brackets(host),
            port,
            tls=tls,
            tokens=tokens,
            spans=None if tracer is None else tracer.counts,
        )
    except OSError as error:
        raise _address_in_use(listen) from error
    return server, f"{host}:{server.sockets[0].getsockname()[1]}"


def _address_in_use(listen: str) -> AddressInUse:
    return AddressInUse(
        f"cannot listen on {listen}: in use, or not an address of this machine; choose another"
    )
