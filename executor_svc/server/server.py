"""One executor process: the gRPC server and its threads, their start and stop."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import structlog
from grpc_health.v1 import health, health_pb2_grpc

from executor_svc.profile.profiles import Profiles
from executor_svc.server.call_places import (
    MAX_CALLS,
    NUM_LINK_THREADS,
    NUM_OTHER_THREADS,
    CallPlaces,
)
from executor_svc.server.health import HealthServicer
from executor_svc.server.interceptor import ErrorInterceptor
from executor_svc.server.loaded import HEARTBEAT_INTERVAL_S, Engine
from executor_svc.server.progress import Progress
from executor_svc.server.runner_thread import RunnerThread
from executor_svc.server.service import SERVICE_NAME, ExecutorService
from executor_svc.server.step_link import StepLink
from tandem.errors import AddressInUse, Draining, InternalError, TandemError
from tandem.link.codec.wire import MAX_MESSAGE_BYTES
from tandem.network.address import host_and_port, is_unix
from tandem.network.link_security import check_listener, socket_of_this_user
from tandem.network.link_token import LinkToken, TokenGuard
from tandem.network.listen_address import ListenAddress
from tandem.network.reflection import serve_reflection
from tandem.network.tls import server_credentials
from tandem.network.tls_files import ServerTls
from tandem.process.telemetry import warn_where_unprotected

READY = "tandem.ready"
PROGRESS = "tandem.progress"

_MAX_STREAMS = 64
"""Most calls at a time on one connection; a scheduler has a handful."""
_STREAM_END_GRACE_S = 2.0
_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", _MAX_STREAMS),
    # Else gRPC counts calls that are over for their client until this process has let go of them,
    # and refuses others for them with REFUSED_STREAM: UNAVAILABLE without a reason.
    ("grpc.http.overload_protection", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A scheduler on a node that vanished closes no connection, and holds its session until a ping
    # goes unanswered: then its successor may open one, and other schedulers once the lease ended.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # This one bounds the wait for a ping's answer; its default is a minute.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)

_log = structlog.get_logger(__name__)


class ExecutorServer:
    """
    The server of one process: it listens first, then loads; `stop` finishes the running step.

    Attributes:
        boot_id: Random id of this instance.
        profiles: Records steps when asked to.
        has_abandoned_step: True if `stop` did not wait for the end of the running step.
        address: Address it listens on; known after `listen`.
    """

    def __init__(
        self,
        load: Callable[[str], Engine],
        on_fatal: Callable[[TandemError], None],
        *,
        tls: ServerTls | None = None,
        token: LinkToken | None = None,
        insecure_link: bool = False,
    ) -> None:
        """
        Args:
            load: Builds the engine for a boot_id; called on the runner thread.
            on_fatal: Called when an error ends the runner, result or heartbeat thread, on that
                thread; also when a new session waits for a step that is stuck, because this process
                will never serve it.
            tls: Files to listen with; None for plain text.
            token: Token that calls must carry, but for health and reflection; None for none.
            insecure_link: True if it may serve every caller where other machines can reach it.

        Raises:
            InvalidConfig: The files of `tls` cannot be used.
        """
        self._tls = tls
        self._token = token
        self._is_authenticated = token is not None or (
            tls is not None and tls.requires_client_certificate
        )
        self._insecure_link = insecure_link
        self._credentials = None if tls is None else server_credentials(tls)
        self.boot_id = uuid.uuid4().hex
        self.address = ""
        self._place: ListenAddress | None = None
        self.has_abandoned_step = False
        self._progress = Progress()
        self._link = StepLink(self.boot_id, progress=self._progress)
        self.profiles = Profiles(self._link.between_steps, lambda: self._link.stopped_by)
        self._service = ExecutorService(self._link, self.profiles, self.boot_id)
        self._health = HealthServicer(("", READY, PROGRESS))
        self._stopping = threading.Event()
        self._server = self._build_server()
        self._runner = RunnerThread(
            self._link,
            self._progress,
            self.profiles,
            boot_id=self.boot_id,
            load=lambda: load(self.boot_id),
            on_ready=self._on_ready,
            on_fatal=self._fail,
        )
        self._on_fatal = on_fatal
        self._heart = threading.Thread(target=self._run_heart, name="heartbeat", daemon=True)

    def listen(self, address: str) -> None:
        """
        Bind and serve; calls that need the model answer EXECUTOR_LOADING until it is loaded. Other
        users cannot open a unix socket unless callers must prove who they are.

        Raises:
            AddressInUse: Another process listens there.
            InvalidConfig: The address cannot be listened on, for example because it is not one of
                this machine's; or other machines can reach it and callers need not prove who they
                are.
        """
        check_listener(
            address,
            is_authenticated=self._is_authenticated,
            insecure_link=self._insecure_link,
        )
        self._place = ListenAddress("listen", address)
        try:
            port = self._add_port(address)
        except RuntimeError as error:
            raise AddressInUse(f"cannot listen on {address}: gRPC could not bind it") from error
        self.address = address
        if not is_unix(address):
            self.address = f"{host_and_port(address)[0]}:{port}"
        for name in ("", PROGRESS):
            self._health.set(name, serving=True)
        self._server.start()
        _log.info("listening", address=self.address, boot_id=self.boot_id)
        warn_where_unprotected(
            {"listen": self.address},
            is_encrypted=self._tls is not None,
            is_authenticated=self._is_authenticated,
        )

    def load(self) -> None:
        """Start loading, heartbeats and, once loaded, steps."""
        self._runner.start()
        self._heart.start()

    def stop(self, grace_s: float | None = None) -> bool:
        """
        Turn unready, finish the running step, end the streams and the server.

        Args:
            grace_s: Seconds that the running step may still take; None for no limit.

        Returns:
            False if the runner thread is still loading or in a step: the process cannot end in good
            order.
        """
        self._health.set(READY, serving=False)
        # A loader that has failed is about to end, but may still be alive here.
        has_failed = self._link.stopped_by is not None
        is_loading = self._service.engine is None and self._runner.is_alive() and not has_failed
        self._link.stop(Draining("the executor is stopping"))
        if self._runner.is_alive() and not is_loading:
            self._runner.join(grace_s)
            self.has_abandoned_step = self._runner.is_alive()
            if self.has_abandoned_step:
                step = self._link.running
                step_id = None if step is None else step.step_id
                _log.error("step_abandoned", step_id=step_id, waited_s=grace_s)
        self._stopping.set()
        self._link.end_streams()
        self._server.stop(_STREAM_END_GRACE_S).wait()
        if self._place is not None:
            self._place.release()
        return not is_loading and not self.has_abandoned_step

    def _add_port(self, address: str) -> int:
        is_open = self._is_authenticated or self._insecure_link
        with socket_of_this_user(address, is_open=is_open):
            if self._credentials is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, self._credentials)

    def _build_server(self) -> grpc.Server:
        guards = [] if self._token is None else [TokenGuard(SERVICE_NAME, self._token)]
        link_threads = ThreadPoolExecutor(NUM_LINK_THREADS, thread_name_prefix="link")
        server = grpc.server(
            ThreadPoolExecutor(NUM_OTHER_THREADS, thread_name_prefix="grpc"),
            interceptors=[ErrorInterceptor(link_threads), *guards, CallPlaces()],
            options=_SERVER_OPTIONS,
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        server.add_generic_rpc_handlers((self._service.handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        serve_reflection(server, (SERVICE_NAME, health.SERVICE_NAME))
        return server

    def _on_ready(self, engine: Engine) -> None:
        self._link.give_credit(engine.description.max_inflight_steps)
        self._service.engine = engine
        self._health.set(READY, serving=True)
        about = engine.description
        _log.info(
            "ready",
            address=self.address,
            model=about.model_name,
            dtype=about.dtype,
            device=about.device,
            threads=engine.num_threads,
            num_slots=about.num_slots,
        )

    def _fail(self, error: TandemError) -> None:
        """Stop with an error and tell it to schedulers, which may blame the running step for it."""
        self._link.stop(error)
        self._on_fatal(error)

    def _run_heart(self) -> None:
        """Beat; end the process if that breaks: schedulers take one without heartbeats for dead."""
        try:
            self._beat()
        except Exception as error:  # noqa: BLE001  # outermost frame of the thread: the process ends
            _log.error("heartbeat_broken", exc_info=error)
            self._fail(InternalError("the heartbeat thread broke: see the log"))

    def _beat(self) -> None:
        """Send heartbeats and check progress, on a thread that no step can hold up."""
        was_stuck = has_given_up = False
        while not self._stopping.wait(HEARTBEAT_INTERVAL_S):
            now_s = time.monotonic()  # before `beat`, which forgives stops up to its own time
            beat = self._link.beat()
            is_stuck = self._progress.is_stuck(now_s)
            if is_stuck and self._link.is_session_waiting and not has_given_up:
                has_given_up = True
                self._fail(
                    InternalError("a step is stuck and its session was given up: start again")
                )
            if is_stuck != was_stuck:
                was_stuck = is_stuck
                self._health.set(PROGRESS, serving=not is_stuck)
                _log.warning(
                    "step_stuck" if is_stuck else "step_goes_on",
                    step_id=beat.running_step_id,
                    elapsed_ms=beat.elapsed_ms,
                )
