"""Captured graphs of decode steps, and the choice of the graph for a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from executor_svc.step.graphs.capture import CaptureReport, Graphs
from executor_svc.step.graphs.plan import GraphPlan
from executor_svc.step.graphs.shapes import GraphShape, match
from executor_svc.step.static_step import Drawing
from tandem.errors import InvalidConfig

_ORDER = (Drawing.FILTERED, Drawing.PLAIN, Drawing.OUTSIDE)
"""Ways of drawing tokens, by the memory they take beside the forward pass, most first."""


class RepeatableStep(Protocol):
    """The step that is captured: `executor_svc.step.static_step.DecodeStep`."""

    @property
    def max_rows(self) -> int:
        """Most rows of a step, padding included."""

    def forget(self) -> None:
        """Drop all rows, so that `run` computes padding alone."""

    def run(self, num_rows: int, drawing: Drawing) -> None:
        """Compute the prepared rows, and padding up to `num_rows`."""


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """Key of a captured decode step."""

    num_rows: int
    drawing: Drawing


class DecodeGraphs:
    """
    The captured decode steps of a runner: a step runs in the smallest graph that has room for its
    rows, padded to it, or eagerly if no graph has room.

    For each number of rows there is one graph for each way of drawing tokens. Graphs that need most
    memory are captured first.
    """

    def __init__(self, step: RepeatableStep, plan: GraphPlan) -> None:
        """
        Args:
            step: The step, on the plan's device; the runner prepares it.
            plan: Sizes to capture.
        """
        self._step = step
        sizes = sorted(plan.sizes, reverse=True)
        keys = [DecodeGraph(size, drawing) for size in sizes for drawing in _ORDER]
        self._graphs = Graphs(
            plan.device,
            keys,
            lambda key: step.run(key.num_rows, key.drawing),
            forget=step.forget,
        )
        self._size_for: list[int | None] = [None] * (step.max_rows + 1)

    @property
    def num_captures(self) -> int:
        """Number of times that all graphs were captured."""
        return self._graphs.num_captures

    def capture(self) -> CaptureReport:
        """As in `Graphs`; the step has forgotten all slots afterwards."""
        report = self._graphs.capture()
        self._fit()
        return report

    def add(self, num_rows: int) -> None:
        """
        Capture steps of so many rows as well; the step has forgotten all slots afterwards.

        Raises:
            InvalidConfig: `num_rows` is not from 1 to the most rows of a step.
            OutOfMemory: The graphs do not fit; names the settings to change.
        """
        most = self._step.max_rows
        if not 1 <= num_rows <= most:
            raise InvalidConfig(
                f"a decode graph has 1 to max_batch_size ({most}) rows, got {num_rows}"
            )
        self._graphs.add([DecodeGraph(num_rows, drawing) for drawing in _ORDER])
        self._fit()

    def drop(self) -> None:
        """As in `Graphs`: steps run eagerly from now on."""
        self._graphs.drop()
        self._fit()

    def restore(self) -> None:
        """As in `Graphs`."""
        self._graphs.restore()
        self._fit()

    def size_for(self, num_rows: int) -> int | None:
        """Return the size of the smallest captured step with room for so many rows, or None."""
        return self._size_for[num_rows]

    def run(self, num_rows: int, drawing: Drawing) -> int:
        """
        Run the prepared step of so many rows.

        Returns:
            Number of rows of the graph that was replayed; 0 if the step ran eagerly.
        """
        size = self._size_for[num_rows]
        if size is None:
            self._step.run(num_rows, drawing)
            return 0
        self._graphs.replay(DecodeGraph(size, drawing))
        return size

    def _fit(self) -> None:
        captured = {key.num_rows for key in self._graphs.keys}
        shapes = [GraphShape(size, 0, size) for size in captured]
        for num_rows in range(len(self._size_for)):
            found = match(shapes, num_tokens=num_rows, num_prefills=0, num_decodes=num_rows)
            self._size_for[num_rows] = None if found is None else found.num_tokens
