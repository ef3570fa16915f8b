"""Steps captured once per shape and replayed by it, whatever device captures them."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import structlog
import torch

from executor_svc.device.out_of_memory import in_one_line, is_out_of_memory
from tandem.errors import InternalError, OutOfMemory

Key = TypeVar("Key", bound=Hashable)

_log = structlog.get_logger(__name__)


class CapturedGraph(Protocol):
    """What one call did on the device, ready to be done again."""

    def replay(self) -> None:
        """Do it again, on the current stream, with what the buffers hold then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """
    What a capture gave.

    Attributes:
        graphs: One per call, in their order.
        num_bytes: Device memory that they hold together, beside the buffers they were given.
    """

    graphs: tuple[CapturedGraph, ...]
    num_bytes: int


class GraphDevice(Protocol):
    """Where graphs are captured."""

    def capture(self, runs: Sequence[Callable[[], None]]) -> Captured:
        """
        Capture calls one after another, all in the one pool of memory of the graphs that live.

        A call may run several times, at least once. It must do the same each time: read and write
        buffers that never move, never look at a value on the host, and keep nothing that it
        allocates.
        """

    def drain(self) -> None:
        """Wait until no replay is running: what it uses is about to go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    """
    What capturing cost.

    Attributes:
        seconds: Warm-up included.
        num_bytes: Device memory held from now on.
        num_graphs: Captured.
    """

    seconds: float
    num_bytes: int
    num_graphs: int


class Graphs(Generic[Key]):
    """
    The captured steps of one runner, by what tells them apart; owned by its thread.

    All share one pool of memory, so that together they need little more than the largest: no two
    run at once, and none leaves anything in the pool for another.
    """

    def __init__(
        self,
        device: GraphDevice,
        keys: Sequence[Key],
        run: Callable[[Key], None],
        *,
        forget: Callable[[], None],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            device: Captures.
            keys: What to capture, the largest first: the pool then need not grow.
            run: Does one of them; rules as in `GraphDevice.capture`.
            forget: Leaves `run` nothing to do but padding; called before and after captures, whose
                calls then count for nothing.
            clock_s: For the report.
        """
        self._device = device
        self._keys = tuple(keys)
        self._run = run
        self._forget = forget
        self._clock_s = clock_s
        self._captured: dict[Key, CapturedGraph] = {}
        self._is_dropped = False
        self.num_captures = 0
        """How often all were captured."""

    @property
    def keys(self) -> tuple[Key, ...]:
        """What can be replayed now."""
        return tuple(self._captured)

    def capture(self) -> CaptureReport:
        """
        Capture all, anew where that was done before, and log what it cost.

        Raises:
            OutOfMemory: Naming the settings to turn.
        """
        self.drop()
        report = self._capture(self._keys)
        self._is_dropped = False
        self.num_captures += 1
        return report

    def add(self, keys: Sequence[Key]) -> None:
        """
        Capture more, now and whenever all are captured anew; what is there stays.

        Raises:
            OutOfMemory: Naming the settings to turn.
        """
        self._keys += tuple(key for key in keys if key not in self._keys)
        missing = [key for key in keys if key not in self._captured]
        if missing:
            self._capture(missing)

    def drop(self) -> None:
        """Forget what was captured, and wait for what runs of it: buffers are about to move."""
        if self._captured:
            self._device.drain()
            self._is_dropped = True
        self._captured.clear()

    def restore(self) -> None:
        """
        Capture anew what was dropped, where anything was: buffers are where they will stay.

        Raises:
            OutOfMemory: Naming the settings to turn.
        """
        if self._is_dropped:
            self.capture()

    def replay(self, key: Key) -> None:
        """
        Do a captured step again.

        Raises:
            InternalError: It is not captured, or no longer.
        """
        graph = self._captured.get(key)
        if graph is None:
            raise InternalError(f"No CUDA graph captured for {key}")
        graph.replay()

    def _capture(self, keys: Sequence[Key]) -> CaptureReport:
        started = self._clock_s()
        captured = self._capture_idle([self._call(key) for key in keys])
        report = CaptureReport(
            seconds=self._clock_s() - started,
            num_bytes=captured.num_bytes,
            num_graphs=len(captured.graphs),
        )
        self._captured.update(zip(keys, captured.graphs, strict=True))
        _log.info(
            "graphs_captured",
            count=report.num_graphs,
            seconds=round(report.seconds, 3),
            bytes=report.num_bytes,
        )
        return report

    def _capture_idle(self, calls: Sequence[Callable[[], None]]) -> Captured:
        self._forget()
        try:
            with torch.inference_mode():
                captured = self._device.capture(calls)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"no memory is left to capture steps ({in_one_line(error)}): lower "
                "num_cuda_graphs or max_batch_size, or leave less to the KV memory"
            ) from error
        self._forget()
        return captured

    def _call(self, key: Key) -> Callable[[], None]:
        return lambda: self._run(key)
