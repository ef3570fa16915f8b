"""Measuring memory: within the container's limits, and what work needs at its peak."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from executor_svc.device import free_memory, memory_probe
from executor_svc.device.memory_probe import HostMeter, Reading, SharedMeter

CPU = torch.device("cpu")
MIB = 2**20


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control group of our own, and a host with more free memory than it allows."""
    monkeypatch.setattr(free_memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(free_memory, "_meminfo_available", lambda: 2**60)
    (tmp_path / "memory").mkdir()
    return tmp_path


class TestRead:
    def test_host_has_what_the_system_says(self):
        """
        Free memory is over nothing and under the total, and this process uses some.
        """
        found = HostMeter(CPU).read()
        assert 0 < found.free <= found.total
        assert MIB < found.used < found.total

    def test_limit_of_the_container_counts(self, cgroup: Path):
        """
        In a control group of version 2 the limit is the total and what is left of it is free.
        """
        (cgroup / "memory.max").write_text(f"{1000 * MIB}\n")
        (cgroup / "memory.current").write_text(f"{300 * MIB}\n")
        found = HostMeter(CPU).read()
        assert (1000 * MIB, 700 * MIB) == (found.total, found.free)

    def test_older_control_groups_count_too(self, cgroup: Path):
        """
        Version 1 has other files of the same meaning; a limit over all memory is none.
        """
        (cgroup / "memory/memory.limit_in_bytes").write_text(f"{1000 * MIB}\n")
        (cgroup / "memory/memory.usage_in_bytes").write_text(f"{400 * MIB}\n")
        (cgroup / "memory/memory.stat").write_text(f"cache 7\ntotal_inactive_file {100 * MIB}\n")
        assert (1000 * MIB, 700 * MIB) == (HostMeter(CPU).read().total, HostMeter(CPU).read().free)
        (cgroup / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
        assert HostMeter(CPU).read().total < 2**60

    def test_pages_of_files_are_free(self, cgroup: Path):
        """
        Inactive pages of files, as of a model just read, are not in use.
        """
        (cgroup / "memory.max").write_text(f"{1000 * MIB}\n")
        (cgroup / "memory.current").write_text(f"{900 * MIB}\n")
        (cgroup / "memory.stat").write_text(f"anon 5\ninactive_file {800 * MIB}\nfile 9\n")
        assert 900 * MIB == free_memory.available_bytes(CPU)

    def test_container_without_a_limit_has_the_hosts_memory(self, cgroup: Path):
        """
        A control group without a limit changes nothing.
        """
        before = HostMeter(CPU).read().total
        (cgroup / "memory.max").write_text("max\n")
        (cgroup / "memory.current").write_text("1\n")
        assert before == HostMeter(CPU).read().total


ROOT = Path(__file__).resolve().parents[3]
PEAK_OF_300_MIB = """
import sys
from pathlib import Path
import torch
from executor_svc.device import memory_probe

memory_probe._CLEAR_REFS = Path(sys.argv[1])

def work():
    torch.ones(300 * 2**20 // 4)

print(memory_probe.meter_of(torch.device("cpu")).peak_of(work))
"""


class TestShared:
    def test_processes_divide_what_they_share(self):
        """
        Total and free memory of a machine are divided among ranks; each uses its own.
        """

        class Meter:
            def read(self) -> Reading:
                return Reading(total=100, free=60, used=7)

            def peak_of(self, work):
                return 5

        meter = SharedMeter(Meter(), 4)
        assert Reading(total=25, free=15, used=7) == meter.read()
        assert 5 == meter.peak_of(lambda: None)


class TestPeak:
    @pytest.mark.slow
    @pytest.mark.parametrize("can_reset", [True, False])
    def test_peak_counts_what_was_given_back(self, can_reset: bool, tmp_path: Path):
        """
        Memory taken and given back by the work is its peak, within a few MiB; where the system cannot start the peak
        anew it is counted over the highest so far.
        """
        clear_refs = memory_probe._CLEAR_REFS if can_reset else tmp_path / "none" / "clear_refs"
        # A process of its own: in one with a past, others give memory back meanwhile.
        command = [sys.executable, "-c", PEAK_OF_300_MIB, str(clear_refs)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        peak = int(done.stdout)
        assert peak <= 330 * MIB
        assert not can_reset or 290 * MIB <= peak

    def test_work_without_memory_has_no_peak(self):
        """
        Work that takes nothing needs less than a few MiB.
        """
        assert HostMeter(CPU).peak_of(lambda: None) < 8 * MIB
