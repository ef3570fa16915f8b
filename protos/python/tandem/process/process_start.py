"""
Start of a service process, and its end if it cannot start: one line and an exit code.

This module has no heavy imports: modules that take seconds are imported after
`end_quietly_on_signals`.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from tandem.errors import InternalError, InvalidConfig, InvalidModel, OutOfMemory, TandemError
from tandem.process.exit_codes import EXIT_FAILED, EXIT_REFUSED
from tandem.wording import gib

MIN_OPEN_FILES = 64
WANTED_OPEN_FILES = 4096
"""Wanted limit of open files, as each client's connection takes one."""

_OF_THE_MACHINE = frozenset(
    {
        errno.EACCES,
        errno.EAGAIN,
        errno.EDQUOT,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOENT,
        errno.ENOMEM,
        errno.ENOSPC,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    }
)
"""Error numbers that a user or operator can fix; any other OSError is a bug in Tandem."""
_OURS = frozenset({"executor_svc", "kernels", "scheduler_svc", "tandem"})


def end_quietly_on_signals() -> None:
    """
    Have SIGINT and SIGTERM end the process at once, without output, until other handlers are set.

    This is for the seconds of imports, in which there is nothing to clean up. The default actions
    would do for SIGTERM, but not in the first process of a container, where the kernel ignores
    them.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _end)


def run_or_refuse(run: Callable[[], int]) -> int:
    """
    Run a service and return its exit code, after one line on stderr if it could not go on.

    A lack of resources is reported by such a line. A bug in Tandem keeps its traceback.
    """
    try:
        return run()
    except TandemError as error:
        return refuse(error)
    except (OSError, MemoryError, ImportError, RuntimeError) as error:
        if _is_mistake(error):
            raise
        return refuse(as_refusal(error))


def refuse(error: TandemError) -> int:
    """Print in one line why the process cannot go on, and return its exit code."""
    sys.stderr.write(f"{error.reason}: {error.message}\n")
    is_refused = isinstance(error, InvalidConfig | InvalidModel | OutOfMemory)
    return EXIT_REFUSED if is_refused else EXIT_FAILED


def check_limits(min_address_space_bytes: int) -> None:
    """
    Check this process's limits, and raise its limit of open files as far as needed and allowed.

    Args:
        min_address_space_bytes: Least address space; with less a library fails without a message.

    Raises:
        InvalidConfig: A limit is too low.
    """
    most_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most_bytes != resource.RLIM_INFINITY and most_bytes < min_address_space_bytes:
        raise InvalidConfig(
            f"this process may have {_gib(most_bytes)} GiB of address space and needs at least "
            f"{_gib(min_address_space_bytes)}: raise or lift that limit (ulimit -v)"
        )
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _is_below(most, MIN_OPEN_FILES):
        raise InvalidConfig(
            f"this process may have {most} open files and needs at least {MIN_OPEN_FILES}, and one "
            f"more for each client: raise that limit (ulimit -n), to {WANTED_OPEN_FILES} say"
        )
    if _is_below(now, WANTED_OPEN_FILES):
        wanted = most if _is_below(most, WANTED_OPEN_FILES) else WANTED_OPEN_FILES
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def check_address_space_left(needed_bytes: int) -> None:
    """
    Check, once libraries are loaded, that the limit leaves address space for threads and memory.

    Raises:
        InvalidConfig: The limit leaves less than `needed_bytes`.
    """
    most_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most_bytes == resource.RLIM_INFINITY:
        return
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not on Linux
        return
    used_bytes = num_pages * resource.getpagesize()
    if most_bytes - used_bytes < needed_bytes:
        raise InvalidConfig(
            f"this process may have {_gib(most_bytes)} GiB of address space, its libraries take "
            f"{_gib(used_bytes)}, and it needs at least {_gib(needed_bytes)} more: raise or lift "
            "that limit (ulimit -v)"
        )


def as_refusal(error: OSError | MemoryError | ImportError | RuntimeError) -> TandemError:
    """Return the error for a start that failed for lack of resources, with advice."""
    if isinstance(error, MemoryError):
        return OutOfMemory(f"memory ran out at the start{_address_space()}: give this process more")
    if isinstance(error, ImportError):
        return InternalError(
            f"a library cannot be loaded: {_line(error)}{_address_space()}: free or allow more "
            "memory, or install the packages again"
        )
    if isinstance(error, RuntimeError) or error.errno == errno.EAGAIN:
        return InvalidConfig(
            f"{_line(error)}{_address_space()}: allow this user more processes and threads (ulimit "
            "-u, pids.max of its control group) or this process more memory"
        )
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return InvalidConfig(
            f"all {most} files that this process may have are open: raise that limit (ulimit -n)"
        )
    where = f"{error.filename}: " if error.filename else ""
    return InvalidConfig(f"the start failed: {where}{error.strerror or _line(error)}")


def _is_mistake(error: OSError | MemoryError | ImportError | RuntimeError) -> bool:
    if isinstance(error, OSError):
        return error.errno not in _OF_THE_MACHINE
    if isinstance(error, ImportError):
        return (error.name or "").partition(".")[0] in _OURS
    return isinstance(error, RuntimeError) and "start new thread" not in str(error)


def _end(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)


def _is_below(limit: int, number: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < number


def _address_space() -> str:
    """Return a clause about an address space limit that may be the cause; empty without one."""
    most_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most_bytes == resource.RLIM_INFINITY:
        return ""
    return f" (this process may have {_gib(most_bytes)} GiB of address space: ulimit -v)"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _gib(num_bytes: int) -> str:
    return gib(num_bytes, ".2g")
