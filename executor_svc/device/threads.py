"""How many threads compute on a CPU."""

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


def use_threads(num_threads: int | None) -> None:
    """
    Let each operation compute with so many threads, by default `default_num_threads`, and one
    operation run at a time: we never ask for two, and their threads would be besides ours.

    Says so where OpenMP was told to bind threads to cores: it binds the process's first thread when
    PyTorch is imported, all others are born with that mask, and so those of the runner and of gRPC
    share one core. `taskset` and cpusets keep a process on its cores without that.
    """
    if bound := binding(os.environ):
        warn(
            "openmp_binds_threads",
            f"OpenMP is told to bind threads to cores ({', '.join(bound)}), so that those of this "
            "process share one: use taskset, or a container's cpuset, instead",
            by=bound,
        )
    torch.set_num_threads(num_threads or default_num_threads())
    if torch.get_num_interop_threads() == 1:
        return
    try:
        torch.set_num_interop_threads(1)
    except RuntimeError as error:  # only where somebody computed in this process before
        _log.info("interop_threads_unchanged", reason=str(error).partition("\n")[0])


def default_num_threads(root: Path = _ROOT) -> int:
    """
    One thread per physical core that this process may run on, within the CPU quota of its cgroup
    and PyTorch's own choice, which follows OMP_NUM_THREADS; at least 1.

    Two threads of one core share what multiplies, so they gain nothing, and wait for each other.
    Which cores it may run on is its affinity mask: that of `taskset`, or a container's cpuset.
    Where OpenMP binds threads the mask is that of one of them, and PyTorch's choice decides.

    Args:
        root: Where /proc and /sys are.
    """
    limits = [torch.get_num_threads(), *(int(quota) for quota in _cpu_quotas(root))]
    if not binding(os.environ):
        limits.append(num_physical_cores(_usable_cpus(), root))
    return max(1, min(limits))


def binding(environ: Mapping[str, str]) -> list[str]:
    """Those of BINDING that are set."""
    return [name for name in BINDING if environ.get(name, "false").lower() != "false"]


def num_physical_cores(cpus: AbstractSet[int], root: Path = _ROOT) -> int:
    """Cores that these logical CPUs are threads of; each is its own where nothing says so."""
    return len({_core_of(cpu, root) for cpu in cpus})


def _usable_cpus() -> AbstractSet[int]:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return os.sched_getaffinity(0)
    return frozenset(range(os.cpu_count() or 1))


def _core_of(cpu: int, root: Path) -> str:
    """The logical CPUs of the same core, as Linux lists them."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    try:
        return topology.read_text(encoding="ascii").strip()
    except OSError:
        return str(cpu)


def _cpu_quotas(root: Path) -> Iterator[float]:
    """CPUs' worth of time that each cgroup around this process allows, of either version."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        is_second = not controllers
        if not is_second and "cpu" not in controllers.split(","):
            continue
        mounted = root / ("sys/fs/cgroup" if is_second else "sys/fs/cgroup/cpu")
        own = PurePosixPath(path.lstrip("/"))
        # Inside a container the path may be the host's: what is not there is passed over.
        for folder in {mounted / own, *(mounted / parent for parent in own.parents), mounted}:
            quota = _second_quota(folder) if is_second else _first_quota(folder)
            if quota is not None:
                yield quota


def _second_quota(folder: Path) -> float | None:
    """Of cgroup version 2: microseconds per period, or "max"."""
    for line in _lines(folder / "cpu.max"):
        quota_us, period_us = line.split()
        return None if quota_us == "max" else int(quota_us) / int(period_us)
    return None


def _first_quota(folder: Path) -> float | None:
    """Of cgroup version 1: two files, -1 without a limit."""
    for quota_us in _lines(folder / "cpu.cfs_quota_us"):
        for period_us in _lines(folder / "cpu.cfs_period_us"):
            return None if int(quota_us) < 0 else int(quota_us) / int(period_us)
    return None


def _lines(file: Path) -> list[str]:
    """Of a file of the kernel's; none where it is not there."""
    try:
        return file.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
