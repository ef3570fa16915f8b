"""The work of an executor process: read settings, serve, stop on SIGTERM."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from executor_svc.config.settings import LoadedSettings, load_settings
from executor_svc.device.idle_threads import let_idle_threads_sleep
from executor_svc.model.files.directory import check_model_directory
from executor_svc.profile.quiet import silence_profiler
from executor_svc.ranks.children import end_with, start_children
from executor_svc.ranks.place import place_of
from executor_svc.server.process import serve
from tandem.errors import TandemError
from tandem.network.grpc_polling import poll_where_waited
from tandem.process.exit_codes import EXIT_DONE
from tandem.process.process_start import check_address_space_left, check_limits, refuse
from tandem.process.telemetry import configure_logging

if TYPE_CHECKING:  # as in `_serve`
    from executor_svc.parallel.process_groups import ProcessGroups
    from executor_svc.ranks.run import Leader
    from executor_svc.server.loaded import Engine

MIN_ADDRESS_SPACE_BYTES = 1 << 30
"""Least address space to start with; PyTorch maps more than this."""
SPACE_BESIDE_LIBRARIES_BYTES = 1 << 30
"""
Address space that must be left for threads, weights and KV once the libraries are loaded; with less
gRPC ends the process without a message.
"""


def run(argv: Sequence[str]) -> int:
    """
    Run one executor and return its exit code.

    Raises:
        TandemError: The process cannot go on; the message says why.
        OSError, MemoryError, ImportError, RuntimeError: The process lacked something.
    """
    loaded = load_settings(argv, os.environ)
    configure_logging(loaded.settings.log_level, loaded.settings.log_format)
    check_limits(MIN_ADDRESS_SPACE_BYTES)
    loaded.check_link()
    check_model_directory(loaded.settings.model)  # before imports that take seconds
    if loaded.settings.dry_run:
        return _forecast(loaded)
    is_alone = loaded.settings.tp_size * loaded.settings.pp_size == 1
    return _serve(loaded) if is_alone else _run_rank(loaded, argv)


def _forecast(loaded: LoadedSettings) -> int:
    """
    Print the memory plan, as a line of JSON if logs are JSON.

    Raises:
        TandemError: The executor could not start; the message says why.
    """
    from executor_svc.memory.plan import as_json, as_text, forecast  # noqa: PLC0415  # imports PyTorch

    show = as_json if loaded.settings.log_format == "json" else as_text
    settings = loaded.settings
    plan = forecast(loaded, tp_size=settings.tp_size, pp_size=settings.pp_size)
    sys.stdout.write(show(plan))
    return EXIT_DONE


def _run_rank(loaded: LoadedSettings, argv: Sequence[str]) -> int:
    """
    Run one rank of a model on several: rank 0 serves, and starts the others if no launcher does.

    Raises:
        TandemError: The process cannot go on; the message says why.
    """
    place = place_of(loaded.settings.tp_size, os.environ, pp_size=loaded.settings.pp_size)
    if place.parent is not None:
        end_with(place.parent)
    # A rank's end is reported in a sentence of ours, not by each library that was waiting for it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    children = start_children(place, argv, os.environ) if place.starts_others else None
    _prepare()
    from executor_svc.engine import load_engine  # noqa: PLC0415  # as in `_serve`
    from executor_svc.ranks.run import Leader, follow  # noqa: PLC0415

    def load(groups: ProcessGroups, device: str, boot_id: str = "") -> Engine:
        settings = loaded.settings.model_copy(update={"device": device})
        return load_engine(replace(loaded, settings=settings), boot_id, groups=groups)

    if place.rank:
        return follow(place, loaded.settings, load)
    leader = Leader(place, loaded.settings, children, load)
    try:
        exit_code = _serve(loaded, leader)
    except TandemError as error:
        exit_code = refuse(error)
    if exit_code == EXIT_DONE:
        leader.end()
        return exit_code
    # The end of our connections ends the others. Tearing collectives down could wait for them.
    sys.stderr.flush()
    os._exit(exit_code)


def _prepare() -> None:
    """Set the environment up that libraries read when they are imported."""
    let_idle_threads_sleep(os.environ)
    poll_where_waited(os.environ)
    silence_profiler(os.environ)


def _serve(loaded: LoadedSettings, leader: Leader | None = None) -> int:
    """
    Serve until a signal or a fatal error.

    Args:
        loaded: The settings.
        leader: Loads together with other ranks; None for a model on one.

    Raises:
        TandemError: The process cannot go on; the message says why.
    """
    _prepare()
    # These modules import gRPC, which reads its environment when imported, and PyTorch, which takes
    # seconds that --help and a mistyped flag need not wait for.
    from executor_svc.engine import load_engine  # noqa: PLC0415
    from executor_svc.profile.torch_recorder import begin_in_this_thread  # noqa: PLC0415
    from executor_svc.server.server import ExecutorServer  # noqa: PLC0415
    from tandem.network.link_token import LinkToken  # noqa: PLC0415

    begin_in_this_thread()
    check_address_space_left(SPACE_BESIDE_LIBRARIES_BYTES)
    settings = loaded.settings
    token = None if settings.link_token_file is None else LinkToken(settings.link_token_file)

    def load(boot_id: str, on_fatal: Callable[[TandemError], None]) -> Engine:
        if leader is None:
            return load_engine(loaded, boot_id)
        return leader.load(boot_id, on_fatal)

    return serve(
        lambda on_fatal: ExecutorServer(
            lambda boot_id: load(boot_id, on_fatal),
            on_fatal,
            tls=settings.tls,
            token=token,
            insecure_link=settings.insecure_link,
        ),
        listen=settings.listen,
        ready_file=settings.ready_file,
        stop_grace_s=settings.stop_grace_s,
    )
