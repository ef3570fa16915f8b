"""
The number of threads that compute on a CPU.

`loky.cpu_count` (3.7) is not used: it reads the CPU quota of the root cgroup alone, which is that
of a container but not that of a systemd service or slice, and rounds it up.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path, PurePosixPath

import structlog
import torch

from executor_svc.start_warnings import warn

_ROOT = Path("/")
BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables by which OpenMP is told to bind threads to cores."""

_log = structlog.get_logger(__name__)


def use_threads(num_threads: int | None, *, num_processes: int = 1) -> None:
    """
    Let each operation compute with so many threads, by default this process's part of
    `default_num_threads`, and run one operation at a time: we never ask for two, and a second would
    bring threads of its own.

    Warn if OpenMP was told to bind threads to cores: it binds the process's first thread when
    PyTorch is imported, all other threads inherit that mask, and so those of the runner and of gRPC
    share one core. `taskset` and cpusets keep a process on its cores without that.

    Args:
        num_threads: Number of threads, None for the default.
        num_processes: Processes that compute on these cores at the same time, this one included.
    """
    if bound := binding(os.environ):
        warn(
            "openmp_binds_threads",
            f"OpenMP is told to bind threads to cores ({', '.join(bound)}), so that those of this "
            "process share one: use taskset, or a container's cpuset, instead",
            by=bound,
        )
    torch.set_num_threads(num_threads or max(1, default_num_threads() // num_processes))
    if torch.get_num_interop_threads() == 1:
        return
    try:
        torch.set_num_interop_threads(1)
    except RuntimeError as error:  # only if this process has computed before
        _log.info("interop_threads_unchanged", reason=str(error).partition("\n")[0])


def default_num_threads(root: Path = _ROOT) -> int:
    """
    Return one thread per physical core that this process may run on, within the CPU quota of its
    cgroup and PyTorch's own choice, which follows OMP_NUM_THREADS; at least 1.

    Two threads of one core share its multipliers, so they gain nothing and wait for each other. The
    affinity mask, set by `taskset` or a container's cpuset, says which cores may be used. If OpenMP
    binds threads, the mask is that of one thread, and PyTorch's choice is used instead.

    Args:
        root: Folder that holds proc and sys.
    """
    limits = [torch.get_num_threads(), *(int(quota) for quota in _cpu_quotas(root))]
    if not binding(os.environ):
        limits.append(num_physical_cores(_usable_cpus(), root))
    return max(1, min(limits))


def binding(environ: Mapping[str, str]) -> list[str]:
    """Return those variables of BINDING that are set, and not to "false"."""
    return [name for name in BINDING if environ.get(name, "false").lower() != "false"]


def num_physical_cores(cpus: AbstractSet[int], root: Path = _ROOT) -> int:
    """
    Count the cores that these logical CPUs are threads of; a CPU without topology files counts as a
    core of its own.
    """
    return len({_core_of(cpu, root) for cpu in cpus})


def _usable_cpus() -> AbstractSet[int]:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return os.sched_getaffinity(0)
    return frozenset(range(os.cpu_count() or 1))


def _core_of(cpu: int, root: Path) -> str:
    """Name the core of a logical CPU by the list of its CPUs, as Linux writes it."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    try:
        return topology.read_text(encoding="ascii").strip()
    except OSError:
        return str(cpu)


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quota, in CPUs, of each cgroup (version 1 or 2) around this process."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        is_second = not controllers
        if not is_second and "cpu" not in controllers.split(","):
            continue
        mounted = root / ("sys/fs/cgroup" if is_second else "sys/fs/cgroup/cpu")
        own = PurePosixPath(path.lstrip("/"))
        # Inside a container the path may be the host's: folders that do not exist are skipped.
        for folder in {mounted / own, *(mounted / parent for parent in own.parents), mounted}:
            quota = _second_quota(folder) if is_second else _first_quota(folder)
            if quota is not None:
                yield quota


def _second_quota(folder: Path) -> float | None:
    """Return the quota of cgroup version 2 in CPUs, or None for "max" or without the file."""
    for line in _lines(folder / "cpu.max"):
        quota_us, period_us = line.split()
        return None if quota_us == "max" else int(quota_us) / int(period_us)
    return None


def _first_quota(folder: Path) -> float | None:
    """Return the quota of cgroup version 1 in CPUs; None if it is -1 or a file is missing."""
    for quota_us in _lines(folder / "cpu.cfs_quota_us"):
        for period_us in _lines(folder / "cpu.cfs_period_us"):
            return None if int(quota_us) < 0 else int(quota_us) / int(period_us)
    return None


def _lines(file: Path) -> list[str]:
    """Return the lines of a kernel file; none if it does not exist."""
    try:
        return file.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
