"""
One scheduler service from start to end: the core thread, the executor's link, the frontends.

The main thread only supervises: it waits for signals, for frontends that connect or exit, and for
the core thread to end. It also ends the process if the core loop hangs.
"""

from __future__ import annotations

import os
import queue
import secrets
import signal
import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import structlog

from scheduler_svc.config.settings import LoadedSettings, SchedulerSettings
from scheduler_svc.executor_client.channel import ExecutorAccess
from scheduler_svc.executor_client.claims import Claims
from scheduler_svc.executor_client.connection import ExecutorConnector
from scheduler_svc.executor_client.link import ExecutorLink
from scheduler_svc.executor_client.model_cache import ModelCache
from scheduler_svc.ipc.messages import Hello
from scheduler_svc.ipc.sockets import CoreSocket
from scheduler_svc.process.frontend_settings import FrontendSettings
from scheduler_svc.process.scratch import CORE_SOCKET, ScratchDirectory
from scheduler_svc.process.supervisor import Frontend, stop_frontends
from scheduler_svc.process.tick_watch import EXIT_AFTER_S, LOOK_INTERVAL_S, TickWatch, exit_stuck
from scheduler_svc.service.loop import CoreLoop
from scheduler_svc.service.port_security import check_files, warn_where_open
from scheduler_svc.service.wakeup import Wakeup
from tandem.link.session import SchedulerId
from tandem.network.listen_address import ListenAddress, check_all_free
from tandem.process.ready_file import write_ready_file

HELLO_DEADLINE_S = 60.0
SAME_SIGNAL_S = 0.5
"""
Seconds after the first signal in which another one counts as the same: a wrapper may forward a
signal that the whole process group got.
"""

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Signal:
    number: int


@dataclass(frozen=True, slots=True)
class _FrontendExited:
    frontend: int
    exit_code: int


@dataclass(frozen=True, slots=True)
class _CoreEnded:
    """Orderly end of the core thread; one that raises is a _ThreadBroken instead."""


@dataclass(frozen=True, slots=True)
class _ThreadBroken:
    thread: str


_News = Hello | _Signal | _FrontendExited | _CoreEnded | _ThreadBroken


class Service:
    """One scheduler service process; `run` may be called once."""

    def __init__(self, loaded: LoadedSettings) -> None:
        """
        Raises:
            InvalidConfig: A file of the link's security cannot be used, or calls to an executor on
                another machine would not prove who calls.
        """
        self._settings = loaded.settings
        self._news: queue.SimpleQueue[_News] = queue.SimpleQueue()
        # Set before anything is created that a signal could leave behind; `run` handles the signal.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        access = ExecutorAccess(self._settings.executor_tls, self._settings.link_token_file)
        addresses = self._settings.link_addresses
        access.check(addresses, insecure_link=self._settings.insecure_link)
        access.warn_where_unprotected(addresses)
        self._scratch = ScratchDirectory()
        self._ipc_path = self._scratch.path / CORE_SOCKET
        self._wakeup = Wakeup()
        self._socket = CoreSocket(self._ipc_path)
        self._loaded = loaded
        self._access = access
        self._claims = Claims()
        self._cache = ModelCache(self._scratch.path / "models")
        self._scheduler_id = scheduler_id(self._settings)
        self._is_running = False
        self._loop = CoreLoop(
            loaded,
            self._socket,
            self._make_link,
            self._wakeup,
            clock=time.monotonic,
            on_hello=self._news.put,
            know_hosts=access.know,
        )
        self._core_thread = threading.Thread(target=self._run_core, name="core", daemon=True)
        self._watch = TickWatch(time.monotonic())
        self._frontends: list[Frontend] = []
        self._hellos: dict[int, Hello] = {}

    def run(self) -> int:
        """
        Serve until a signal or a failure, and return the exit code.

        Raises:
            AddressInUse, InvalidConfig: The service cannot listen on an address; no process or
                thread was started.
        """
        with ExitStack() as stack:
            stack.callback(self._scratch.remove)
            settings = self._frontend_settings(stack)
            threading.excepthook = self._on_thread_broken
            # Frontends first: no gRPC thread runs yet in the process that starts them.
            self._frontends = [Frontend(one, self._on_frontend_exit) for one in settings]
            stack.callback(self._stop_frontends)
            self._is_running = True
            self._core_thread.start()
            exit_code = self._supervise()
            self._loop.stop_links(release=exit_code == 0)
        _log.info("stopped", exit_code=exit_code)
        return exit_code

    def _make_link(self, address: str) -> ExecutorLink:
        """
        Make the link to the executor at an address, or to one that stands by in its place.

        Raises:
            InvalidConfig: Calls to this address would not prove who calls.
        """
        settings = self._settings
        self._access.check((address,), insecure_link=settings.insecure_link)
        connector = ExecutorConnector(
            (address, *settings.standby_addresses),
            scheduler=self._scheduler_id,
            lease_ms=settings.lease_ms,
            take_over=settings.take_over and not self._is_running,
            cache=self._cache,
            accept=lambda description: self._loaded.limits_on(description.geometry),
            access=self._access,
            claims=self._claims,
        )
        return ExecutorLink(connector, wake=self._wakeup.set)

    def _stop_frontends(self) -> None:
        for frontend in self._frontends:
            if frontend.index not in self._hellos:  # it still loads, for seconds, and has no call
                frontend.kill()
        stop_frontends(self._frontends)

    def _frontend_settings(self, stack: ExitStack) -> list[FrontendSettings]:
        settings = self._settings
        is_shared = settings.frontends > 1
        addresses = settings.listen_addresses()
        check_all_free(addresses)
        security = settings.frontend_security()
        check_files(security)
        held = {
            name: stack.enter_context(
                ListenAddress(name, address, is_shared=is_shared and name == "listen")
            )
            for name, address in addresses.items()
        }
        return [
            FrontendSettings(
                index=index,
                ipc_path=str(self._ipc_path),
                listen=held["listen"].address,
                share_port=is_shared,
                admin_listen=settings.admin_listen if index == 0 else None,
                metrics_listen=settings.metrics_listen if index == 0 else None,
                local_listen=settings.local_listen if index == 0 else None,
                log_level=settings.log_level,
                log_format=settings.log_format,
                max_message_bytes=settings.max_message_bytes,
                undecoded_share=settings.undecoded_share,
                max_streams_per_connection=settings.max_streams_per_connection,
                max_num_seqs=settings.max_num_seqs,
                max_connection_age_s=settings.max_connection_age_s,
                max_connection_age_grace_s=settings.max_connection_age_grace_s,
                drain_grace_s=settings.drain_grace_s,
                stall_deadline_s=settings.stall_deadline_s,
                max_pending_bytes=settings.stream_buffer_bytes,
                scores_prompts=not settings.materialize_only_last_token_logits,
                security=security,
                executor_ca=_text(settings.executor_ca),
                executor_cert=_text(settings.executor_cert),
                executor_key=_text(settings.executor_key),
                link_token_file=_text(settings.link_token_file),
                otlp_endpoint=settings.otlp_endpoint,
            )
            for index in range(settings.frontends)
        ]

    def _run_core(self) -> None:
        try:
            self._loop.run()
        finally:
            self._socket.close()
        self._news.put(_CoreEnded())

    def _on_thread_broken(self, about: threading.ExceptHookArgs) -> None:
        thread = "" if about.thread is None else about.thread.name
        error = about.exc_value
        _log.error("thread_broken", thread=thread, exc_info=error)
        # Threads that libraries start have numbered names; their failures do not end the service.
        if not thread.startswith("Thread-"):
            self._news.put(_ThreadBroken(thread))

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._news.put(_Signal(number))

    def _on_frontend_exit(self, frontend: int, exit_code: int) -> None:
        self._news.put(_FrontendExited(frontend, exit_code))

    def _supervise(self) -> int:
        """Wait until the service is over; return 0 after an orderly stop, else 1."""
        deadline_s = time.monotonic() + HELLO_DEADLINE_S
        stopping_since_s: float | None = None
        while True:
            news = self._next_news()
            is_waiting = len(self._hellos) < len(self._frontends) and stopping_since_s is None
            if news is None and is_waiting and time.monotonic() > deadline_s:
                _log.error("frontends_not_ready", waited_s=HELLO_DEADLINE_S)
                return 1
            match news:
                case Hello():
                    self._welcome(news)
                case _Signal(number=number) if stopping_since_s is None:
                    _log.info("stopping", signal=signal.Signals(number).name)
                    stopping_since_s = time.monotonic()
                    self._loop.stop(self._settings.drain_grace_s)
                case _Signal(number=number):
                    asked_s = stopping_since_s or 0.0
                    if time.monotonic() - asked_s > SAME_SIGNAL_S:
                        self._exit_at_once(number)
                case _FrontendExited(frontend=frontend, exit_code=exit_code):
                    _log.error("frontend_exited", frontend=frontend, exit_code=exit_code)
                    self._loop.frontend_died(frontend)
                    return 1
                case _CoreEnded():
                    return 0
                case _ThreadBroken():
                    return 1

    def _next_news(self) -> _News | None:
        """
        Wait up to `LOOK_INTERVAL_S` for the next event; end the process if the core loop has made
        no turn for `EXIT_AFTER_S`.
        """
        if self._watch.look(self._loop.turns.count, time.monotonic()) > EXIT_AFTER_S:
            self._exit_stuck()
        try:
            return self._news.get(timeout=LOOK_INTERVAL_S)
        except queue.Empty:
            return None

    def _exit_stuck(self) -> NoReturn:
        """End this process as its core loop hangs; clients resume with the next process."""
        for frontend in self._frontends:
            frontend.kill()
        self._scratch.remove()
        exit_stuck("core", self._loop.turns.made_by)

    def _exit_at_once(self, number: int) -> NoReturn:
        """End this process at a second signal, without waiting for requests or threads."""
        _log.warning("stopped_at_once", signal=signal.Signals(number).name)
        for frontend in self._frontends:
            frontend.kill()
        self._scratch.remove()
        os._exit(128 + number)

    def _welcome(self, hello: Hello) -> None:
        self._hellos[hello.frontend_index] = hello
        if len(self._hellos) < len(self._frontends):
            return
        first = self._hellos[0]
        addresses = {
            "address": first.address,
            "admin_address": first.admin_address,
            "metrics_address": first.metrics_address,
        }
        _log.info("listening", frontends=len(self._frontends), **addresses, pid=os.getpid())
        warn_where_open(self._settings.listen_addresses(), self._settings.frontend_security())
        if self._settings.ready_file is not None:
            write_ready_file(self._settings.ready_file, addresses)


def scheduler_id(settings: SchedulerSettings) -> SchedulerId:
    """
    Return this scheduler's id: the same name at every start on this host and address, and another
    incarnation.
    """
    incarnation = f"{os.getpid()}-{secrets.token_hex(4)}"
    # With port 0 the address names no scheduler, as others on this host may use port 0 too: the
    # name is then a new one at every start.
    where = incarnation if settings.listen.endswith(":0") else settings.listen
    name = settings.scheduler_name or f"{socket.gethostname()}-{where}"
    return SchedulerId(name=name, incarnation=incarnation)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
