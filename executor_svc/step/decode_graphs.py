"""Decode steps: which of them run as captured graphs, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from executor_svc.step.graphs.capture import CaptureReport, Graphs
from executor_svc.step.graphs.plan import GraphPlan
from executor_svc.step.graphs.shapes import GraphShape, match
from executor_svc.step.static_step import Drawing
from tandem.errors import InvalidConfig

_ORDER = (Drawing.FILTERED, Drawing.PLAIN, Drawing.OUTSIDE)
"""By the memory that drawing takes beside the forward pass, most first."""


class RepeatableStep(Protocol):
    """What is captured: `executor_svc.step.static_step.DecodeStep`."""

    @property
    def max_rows(self) -> int:
        """Most rows of a step, padding included."""

    def forget(self) -> None:
        """Have no rows: what runs then computes padding alone."""

    def run(self, num_rows: int, drawing: Drawing) -> None:
        """Compute the rows that were prepared, and padding up to `num_rows`."""


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """What tells one captured decode step from another."""

    num_rows: int
    drawing: Drawing


class DecodeGraphs:
    """
    The captured decode steps of a runner: a step runs in the smallest graph that has room for its
    rows, padded to it, or eagerly where none has.

    For each number of rows there is a graph by way of drawing tokens, those first that need most
    memory.
    """

    def __init__(self, step: RepeatableStep, plan: GraphPlan) -> None:
        """
        Args:
            step: Runs on the plan's device; prepared by the runner.
            plan: What to capture.
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
        """How often all were captured."""
        return self._graphs.num_captures

    def capture(self) -> CaptureReport:
        """As in `Graphs`; the step knows no slot afterwards."""
        report = self._graphs.capture()
        self._fit()
        return report

    def add(self, num_rows: int) -> None:
        """
        Capture steps of so many rows as well; the step knows no slot afterwards.

        Raises:
            InvalidConfig: Not from 1 to the most rows of a step.
            OutOfMemory: Naming the settings to turn.
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
        """Rows of the smallest captured step with room for so many; None: there is none."""
        return self._size_for[num_rows]

    def run(self, num_rows: int, drawing: Drawing) -> int:
        """
        Do the prepared step of so many rows.

        Returns:
            Rows of the graph that did it, 0 where it ran eagerly.
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
