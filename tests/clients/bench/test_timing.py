"""Measurement of a call's time, by clocks that tests wind."""

from __future__ import annotations

import contextlib

import pytest
import torch

from executor_svc.step.graphs.capture import Captured
from tandem_bench.device import timing
from tandem_bench.device.case import Case, measure
from tandem_bench.device.floors import Ceilings
from tandem_bench.device.timing import CpuTimer, CudaTimer, num_copies


class Clock:
    """Clock that goes on by what calls take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now_s)

    def call(self, seconds: list[float]):
        """Return a call that takes these times in turn, the last one ever after."""

        def run() -> None:
            self.now_s += seconds.pop(0) if len(seconds) > 1 else seconds[0]

        return run


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


class TestCpu:
    def test_time_is_the_median_round_without_the_first(self, clock):
        """
        One round warms up; of the others the median counts, however slow some are.
        """
        call = clock.call([50.0, 1.0, 9.0, 1.0, 1.0, 9.0, 1.0])
        assert 1.0 == CpuTimer().seconds([call], budget_s=10.0)

    def test_round_is_shared_by_its_calls(self, clock):
        """
        A round runs every call once, and each has its share of the round's time.
        """
        assert 3.0 == CpuTimer().seconds([clock.call([2.0]), clock.call([4.0])], budget_s=1.0)

    def test_slow_calls_run_three_times_all_the_same(self, clock):
        """
        A call that takes longer than the budget is still measured three times.
        """
        seconds = [1.0, 5.0, 6.0, 7.0, 99.0]
        assert 6.0 == CpuTimer().seconds([clock.call(seconds)], budget_s=0.1)


class FakeGraphs:
    """Stands for CUDA's graphs: a replay is the call itself, on a clock in milliseconds."""

    def __init__(self, _device: torch.device) -> None:
        pass

    def capture(self, runs):
        for run in runs:
            run()
        return Captured(graphs=tuple(FakeGraph(run) for run in runs), num_bytes=0)


class FakeGraph:
    def __init__(self, run) -> None:
        self.replay = run


class TestCuda:
    def test_time_is_that_between_events_around_a_replay(self, clock, monkeypatch):
        """
        All calls are captured as one graph, and a replay's time by the device's events is shared among them.
        """

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at_s = clock.now_s

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Event) -> float:
                return 1e3 * (end.at_s - self.at_s)

        monkeypatch.setattr(timing, "CudaGraphs", FakeGraphs)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        calls = [clock.call([2.0]), clock.call([4.0])]
        assert 3.0 == pytest.approx(CudaTimer(torch.device("cuda")).seconds(calls, budget_s=1.0))


class TestCold:
    def test_buffers_together_outgrow_the_cache(self):
        """
        There are as many sets of buffers as fill several caches, one where one does, and no more than 64.
        """
        timer = CudaTimer(torch.device("cuda"))
        assert 1 == num_copies(timer, timer.cold_bytes)
        assert 8 == num_copies(timer, timer.cold_bytes // 8)
        assert 64 == num_copies(timer, 1) == num_copies(timer, 0)


class TestMeasure:
    @pytest.mark.parametrize(
        ("num_flop", "percent", "bound"), [(0, 25.0, "memory"), (300, 75.0, "compute")]
    )
    def test_percentage_is_of_the_ceiling_that_bounds_it(self, clock, num_flop, percent, bound):
        """
        The least time by memory or by products, whichever is more, over the time taken.
        """
        case = Case(
            operation="work",
            shape="",
            implementation="tandem",
            num_bytes=100,
            num_flop=num_flop,
            make=lambda _seed: clock.call([4.0]),
        )
        ceilings = Ceilings(bytes_per_s=100.0, flop_per_s=100.0)
        measured = measure(case, ceilings, CpuTimer(), 1.0)
        assert (percent, bound) == (measured.percent, measured.bound)
        assert 4e6 == measured.as_json()["time_us"]
