"""Timers of work on a device that keep its buffers out of the caches between runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from executor_svc.step.graphs.capture import CapturedGraph
from executor_svc.step.graphs.cuda import CudaGraphs

Call = Callable[[], object]

_MIN_ROUNDS = 3
_MAX_ROUNDS = 1000
_CUDA_COLD_BYTES = 4 * 50 * 1024**2
"""Bytes that rounds touch on a GPU: four times the second-level cache of an H100 or H200."""
_CPU_COLD_BYTES = 64 * 1024**2
"""Bytes that rounds touch on a CPU: more than a core's share of a last-level cache holds."""
_MAX_COPIES = 64


class Timer(Protocol):
    """Timer of the same work on several sets of buffers, one set after the other."""

    @property
    def cold_bytes(self) -> int:
        """Bytes that all sets of buffers should hold together, so that none is still in a cache."""

    def seconds(self, calls: Sequence[Call], budget_s: float) -> float:
        """
        Measure the time of one call.

        Args:
            calls: The same work on different buffers; run in turn.
            budget_s: Seconds for which rounds of all calls are repeated, about; three rounds at
                least.

        Returns:
            Seconds of one call: the median over rounds of a round's mean.
        """


def num_copies(timer: Timer, num_bytes: int) -> int:
    """Return the number of sets of `num_bytes` to use; at most 64, so small ones do stay cached."""
    return max(1, min(_MAX_COPIES, -(-timer.cold_bytes // max(1, num_bytes))))


class CpuTimer:
    """Timer by the wall clock; the calls use their own threads."""

    cold_bytes = _CPU_COLD_BYTES

    def seconds(self, calls: Sequence[Call], budget_s: float) -> float:
        """Measure as `Timer.seconds` says, after one round to warm up."""
        _run_all(calls)
        rounds: list[float] = []
        started = time.perf_counter()
        while not _is_enough(len(rounds), time.perf_counter() - started, budget_s):
            before = time.perf_counter()
            _run_all(calls)
            rounds.append((time.perf_counter() - before) / len(calls))
        return statistics.median(rounds)


class CudaTimer:
    """
    Timer by CUDA events around replays of a captured graph, so that host time is not measured.

    Calls must be fit for capture: they must not synchronise with the device.
    """

    cold_bytes = _CUDA_COLD_BYTES

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seconds(self, calls: Sequence[Call], budget_s: float) -> float:
        """Measure as `Timer.seconds` says, after compiling kernels and one replay to warm up."""
        (graph,) = CudaGraphs(self._device).capture([lambda: _run_all(calls)]).graphs
        with torch.cuda.device(self._device):
            graph.replay()
            torch.cuda.synchronize()
            rounds: list[float] = []
            started = time.perf_counter()
            while not _is_enough(len(rounds), time.perf_counter() - started, budget_s):
                rounds.append(_replay_s(graph) / len(calls))
        return statistics.median(rounds)


def _replay_s(graph: CapturedGraph) -> float:
    make: Callable[..., torch.cuda.Event] = torch.cuda.Event  # has no types
    begin, end = make(enable_timing=True), make(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def timer_of(device: torch.device) -> Timer:
    """Return the timer for a device."""
    return CudaTimer(device) if device.type == "cuda" else CpuTimer()


def _run_all(calls: Sequence[Call]) -> None:
    with torch.inference_mode():
        for call in calls:
            call()


def _is_enough(num_rounds: int, spent_s: float, budget_s: float) -> bool:
    return num_rounds >= _MIN_ROUNDS and (spent_s >= budget_s or num_rounds >= _MAX_ROUNDS)
