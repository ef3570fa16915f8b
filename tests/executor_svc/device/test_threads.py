"""Number of threads that compute on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import structlog
import torch

from executor_svc.device import threads
from executor_svc.device.threads import default_num_threads, num_physical_cores
from tests.threads import NUM_THREADS

EIGHT_CORES = {cpu: f"{cpu},{cpu + 8}" for cpu in range(8)}
TWICE = EIGHT_CORES | {cpu + 8: siblings for cpu, siblings in EIGHT_CORES.items()}
"""Logical CPUs 0 to 15, of which i and i + 8 are one core."""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with eight cores of two threads each, of which PyTorch would use all."""
    for cpu, siblings in TWICE.items():
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: frozenset(range(16)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    for name in threads.BINDING:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def write(root, files: dict[str, str]) -> None:
    """Write some of a machine's files."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


class TestDefault:
    def test_one_per_physical_core(self, machine):
        """
        Without limits there are as many threads as physical cores, not as logical CPUs.
        """
        assert 8 == default_num_threads(machine)

    @pytest.mark.parametrize(
        ("cpus", "expected"),
        [({0, 1, 2}, 3), ({0, 8}, 1), ({0, 1, 8, 9, 10}, 3), ({15}, 1)],
        ids=["three-cores", "one-core", "three-of-five", "one-thread"],
    )
    def test_cores_of_the_affinity_mask_count(self, cpus, expected, machine, monkeypatch):
        """
        Only cores that the process may run on count, each once.
        """
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: frozenset(cpus))
        assert expected == default_num_threads(machine)

    def test_no_more_than_pytorch_would_use(self, machine, monkeypatch):
        """
        The number of threads that PyTorch was told, as by OMP_NUM_THREADS, is a limit too.
        """
        monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
        assert 5 == default_num_threads(machine)

    def test_where_openmp_binds_threads_pytorch_decides(self, machine, monkeypatch):
        """
        The mask of a thread that OpenMP has bound to one core does not count.
        """
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: frozenset({0}))
        monkeypatch.setenv("OMP_PROC_BIND", "close")
        assert 16 == default_num_threads(machine)
        monkeypatch.setenv("OMP_PROC_BIND", "FALSE")
        assert 1 == default_num_threads(machine)

    def test_cpus_without_topology_are_cores(self, tmp_path):
        """
        A CPU counts as one core when the kernel does not say which CPUs share a core.
        """
        assert 3 == num_physical_cores({0, 1, 7}, tmp_path)

    @pytest.mark.parametrize(
        ("quota", "expected"),
        [("max 100000", 8), ("300000 100000", 3), ("50000 100000", 1), ("1600000 100000", 8)],
    )
    def test_quota_of_a_container(self, quota, expected, machine):
        """
        There are no more threads than whole CPUs of the cgroup's quota, and at least one.
        """
        write(machine, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": quota})
        assert expected == default_num_threads(machine)

    def test_the_smallest_quota_around_the_process_counts(self, machine):
        """
        Quotas of a service and of the slices around it all limit.
        """
        files = {
            "proc/self/cgroup": "0::/serving.slice/executor.service",
            "sys/fs/cgroup/serving.slice/executor.service/cpu.max": "600000 100000",
            "sys/fs/cgroup/serving.slice/cpu.max": "400000 100000",
        }
        write(machine, files)
        assert 4 == default_num_threads(machine)

    @pytest.mark.parametrize(("quota_us", "expected"), [("-1", 8), ("250000", 2)])
    def test_quota_of_the_first_version(self, quota_us, expected, machine):
        """
        Version 1 keeps quota and period in two files, and a path of the host's is passed over.
        """
        files = {
            "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n0::/",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": quota_us,
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        }
        write(machine, files)
        assert expected == default_num_threads(machine)


class TestUse:
    @pytest.mark.slow
    def test_threads_are_set_before_anything_is_computed(self):
        """
        In a fresh process operations get the default or the threads that were asked for, and run one at
        a time.
        """
        program = """
import torch
from executor_svc.device.threads import default_num_threads, use_threads

default = default_num_threads()
for given, expected in ((None, default), (default + 1, default + 1)):
    use_threads(given)
    assert expected == torch.get_num_threads()
    assert 1 == torch.get_num_interop_threads()
"""
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
        assert 0 == run.returncode, run.stderr

    def test_processes_divide_the_cores(self, monkeypatch):
        """
        Ranks on one machine have a part of its cores each, at least one, unless a number is set.
        """
        asked = []
        monkeypatch.setattr(threads, "default_num_threads", lambda: 8)
        monkeypatch.setattr(torch, "set_num_threads", asked.append)
        for num_processes in (1, 3, 16):
            threads.use_threads(None, num_processes=num_processes)
        threads.use_threads(6, num_processes=3)
        assert [8, 2, 1, 6] == asked

    @pytest.mark.parametrize("number", [NUM_THREADS + 1, NUM_THREADS + 2])
    def test_threads_that_a_test_sets_are_not_those_of_the_next(self, number):
        """
        Each test begins with the threads that the run has, whatever an engine before it has set.
        """
        assert NUM_THREADS == torch.get_num_threads()
        threads.use_threads(number)
        assert number == torch.get_num_threads()

    def test_bound_threads_are_told(self, monkeypatch):
        """
        A warning names the variables by which OpenMP binds threads, and what to use instead.
        """
        for name in threads.BINDING:
            monkeypatch.setenv(name, "false")
        monkeypatch.setenv("OMP_PLACES", "cores")
        with structlog.testing.capture_logs() as logs:
            threads.use_threads(torch.get_num_threads())
        (warning,) = [line for line in logs if line["log_level"] == "warning"]
        assert ("openmp_binds_threads", ["OMP_PLACES"]) == (warning["event"], warning["by"])

    def test_it_is_too_late_once_something_was_computed(self, monkeypatch):
        """
        A process that has used its other threads already keeps them, and goes on.
        """
        before = torch.get_num_threads()
        asked = []

        def refuse(count):
            asked.append(count)
            raise RuntimeError("cannot set number of interop threads after parallel work")

        monkeypatch.setattr(torch, "get_num_interop_threads", lambda: 4)
        monkeypatch.setattr(torch, "set_num_interop_threads", refuse)
        threads.use_threads(before)
        assert [1] == asked
        assert before == torch.get_num_threads()
