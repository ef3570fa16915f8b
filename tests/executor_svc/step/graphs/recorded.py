"""
Graphs that a CPU pretends to capture: the same function runs again, and is held to everything that
a real graph takes for granted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from executor_svc.step.graphs.capture import Captured
from tests.executor_svc.step.graphs.recorder import recorded, recorded_again
from tests.executor_svc.step.graphs.recording import Recording


class RecordedGraphs:
    """
    Proves on a CPU that a step can be captured, and that replays of it do what it would do.

    A capture runs the call once and refuses what a stream capture refuses: looking at a value on
    the host, shapes that depend on values, random generators, tensors that it keeps. A replay runs
    it again and compares, operation by operation, with the capture: the same operations, shapes and
    numbers, on the same buffers, none of which has moved or gone. A real graph would have repeated
    the captured ones instead, so every difference is an error there. Memory that an operation
    leaves uninitialised is filled with NaN.

    Seen is what goes through torch's dispatcher: kernels launched past it, such as Triton's, are
    not.
    """

    def capture(self, runs: Sequence[Callable[[], None]]) -> Captured:
        """
        Capture as in `GraphDevice`; memory is all that the largest call allocated, none used twice.
        """
        recordings = [recorded(run) for run in runs]
        return Captured(
            graphs=tuple(map(_Graph, runs, recordings)),
            num_bytes=max((recording.allocated_bytes for recording in recordings), default=0),
        )

    def drain(self) -> None:
        """Drain as in `GraphDevice`; a replay is done when the call is back."""


class _Graph:
    def __init__(self, run: Callable[[], None], recording: Recording) -> None:
        self._run = run
        self._recording = recording

    def replay(self) -> None:
        recorded_again(self._run, self._recording)
