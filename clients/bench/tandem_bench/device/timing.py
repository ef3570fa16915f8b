"""How long work takes on a device, with what it reads not left in a cache by the run before."""

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
"""Four times the second-level cache of an H100 or H200."""
_CPU_COLD_BYTES = 64 * 1024**2
"""Beyond what a core's share of a last-level cache holds."""
_MAX_COPIES = 64


class Timer(Protocol):
    """Times the same work on several sets of buffers, one set after the other."""

    @property
    def cold_bytes(self) -> int:
        """What the sets of buffers should hold together, so that none is still in a cache."""

    def seconds(self, calls: Sequence[Call], budget_s: float) -> float:
        """
        The time of one call.

        Args:
            calls: The same work, each on its own buffers; run in turn.
            budget_s: Repeats rounds of all calls for about so long, three at least.

        Returns:
            The median over rounds of a round's mean.
        """


def num_copies(timer: Timer, num_bytes: int) -> int:
    """Sets of buffers of `num_bytes` each that are needed; small ones stay cached: 64 at most."""
    return max(1, min(_MAX_COPIES, -(-timer.cold_bytes // max(1, num_bytes))))


class CpuTimer:
    """By the clock, with the calls' own threads."""

    cold_bytes = _CPU_COLD_BYTES

    def seconds(self, calls: Sequence[Call], budget_s: float) -> float:
        """As `Timer.seconds`; one round warms up."""
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
    By events around replays of a captured graph: no time of the host is among what is measured.

    Calls must be fit for capture: no look at the device from the host.
    """

    cold_bytes = _CUDA_COLD_BYTES

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seconds(self, calls: Sequence[Call], budget_s: float) -> float:
        """As `Timer.seconds`; kernels are compiled and one replay warms up before."""
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
    """The timer for a device."""
    return CudaTimer(device) if device.type == "cuda" else CpuTimer()


def _run_all(calls: Sequence[Call]) -> None:
    with torch.inference_mode():
        for call in calls:
            call()


def _is_enough(num_rounds: int, spent_s: float, budget_s: float) -> bool:
    return num_rounds >= _MIN_ROUNDS and (spent_s >= budget_s or num_rounds >= _MAX_ROUNDS)
