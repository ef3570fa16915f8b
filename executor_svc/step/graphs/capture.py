"""Capture of steps, once per shape, and their replay, on any device that can capture."""

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
    """The recorded work of one call on the device."""

    def replay(self) -> None:
        """Repeat the work on the current stream, with the buffers' contents of that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """
    The result of a capture.

    Attributes:
        graphs: Graphs of the calls, in their order.
        num_bytes: Device memory that they hold together, beside their input and output buffers.
    """

    graphs: tuple[CapturedGraph, ...]
    num_bytes: int


class GraphDevice(Protocol):
    """A device that captures graphs."""

    def capture(self, runs: Sequence[Callable[[], None]]) -> Captured:
        """
        Capture calls one after another, in the one memory pool that all live graphs share.

        A call runs at least once, possibly several times. It must do the same each time: read and
        write buffers that never move, never read a value on the host, and keep nothing that it
        allocates.
        """

    def drain(self) -> None:
        """Wait until no replay is running, because its memory is about to be freed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    """
    The cost of a capture.

    Attributes:
        seconds: Time taken, warm-up included.
        num_bytes: Device memory that the graphs hold from now on.
        num_graphs: Number of captured graphs.
    """

    seconds: float
    num_bytes: int
    num_graphs: int


class Graphs(Generic[Key]):
    """
    The captured steps of one runner by their keys; owned by the runner's thread.

    All share one memory pool, so that together they need little more than the largest. This is safe
    because no two run at once, and none leaves data in the pool for another.
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
            device: Device that captures.
            keys: Keys of the steps to capture, the largest first, so that the pool need not grow.
            run: Runs the step of a key; the rules of `GraphDevice.capture` apply.
            forget: Makes `run` compute padding alone; called before and after captures, so that
                their runs change no slot.
            clock_s: Clock in seconds, for the report.
        """
        self._device = device
        self._keys = tuple(keys)
        self._run = run
        self._forget = forget
        self._clock_s = clock_s
        self._captured: dict[Key, CapturedGraph] = {}
        self._is_dropped = False
        self.num_captures = 0
        """Number of times that all graphs were captured."""

    @property
    def keys(self) -> tuple[Key, ...]:
        """Keys of the steps that can be replayed now."""
        return tuple(self._captured)

    def capture(self) -> CaptureReport:
        """
        Capture all steps, dropping earlier captures, and log the cost.

        Raises:
            OutOfMemory: The graphs do not fit; names the settings to change.
        """
        self.drop()
        report = self._capture(self._keys)
        self._is_dropped = False
        self.num_captures += 1
        return report

    def add(self, keys: Sequence[Key]) -> None:
        """
        Capture more steps, now and whenever all are captured again; existing graphs stay.

        Raises:
            OutOfMemory: The graphs do not fit; names the settings to change.
        """
        self._keys += tuple(key for key in keys if key not in self._keys)
        missing = [key for key in keys if key not in self._captured]
        if missing:
            self._capture(missing)

    def drop(self) -> None:
        """Drop all graphs after their replays have ended, because buffers are about to move."""
        if self._captured:
            self._device.drain()
            self._is_dropped = True
        self._captured.clear()

    def restore(self) -> None:
        """
        Capture all graphs again if they were dropped; the buffers have their final addresses.

        Raises:
            OutOfMemory: The graphs do not fit; names the settings to change.
        """
        if self._is_dropped:
            self.capture()

    def replay(self, key: Key) -> None:
        """
        Replay a captured step.

        Raises:
            InternalError: The step is not captured, or its graph was dropped.
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
