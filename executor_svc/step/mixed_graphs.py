"""Captured graphs of steps with prompts, and the choice of the graph for a step."""

from __future__ import annotations

from functools import partial

from executor_svc.device.queue import DeviceQueue
from executor_svc.slots.sampling import SlotSampling
from executor_svc.step.batch_inputs import SamplingRows
from executor_svc.step.graphs.capture import CaptureReport, Graphs
from executor_svc.step.graphs.plan import GraphPlan
from executor_svc.step.graphs.shapes import GraphShape, match
from executor_svc.step.mixed_step import MixedStep
from executor_svc.step.pending_step import Launched, fetch_tokens
from tandem.link.batch import ROW_SAMPLES, Batch
from tandem.link.slots.slot_state import SlotState


class MixedGraphs:
    """
    The captured steps of a runner that compute prompts, with or without decodes: a step runs in the
    smallest graph that has room for it.

    All tokens are computed alike, so that decodes may take the room of prefills. A step runs
    eagerly if `SlotSampling.drawn_by_graphs` denies it (edits of logits, logprobs, margins).
    """

    def __init__(
        self,
        step: MixedStep,
        plan: GraphPlan,
        sampling: SlotSampling,
        *,
        margin_eps: float | None,
    ) -> None:
        """
        Args:
            step: The step, on the plan's device; only this object prepares its buffers.
            plan: Shapes to capture.
            sampling: Sampling parameters of the slots.
            margin_eps: Logit noise for margins; None if margins are not collected.
        """
        self._step = step
        self._sampling = sampling
        self._margin_eps = margin_eps
        self._graphs = Graphs(plan.device, plan.mixed, step.run, forget=step.forget)

    def capture(self) -> CaptureReport:
        """As in `Graphs`."""
        return self._graphs.capture()

    def drop(self) -> None:
        """As in `Graphs`: steps with prompts run eagerly from now on."""
        self._graphs.drop()

    def restore(self) -> None:
        """As in `Graphs`."""
        self._graphs.restore()

    def shape_for(self, batch: Batch, rows: SamplingRows) -> GraphShape | None:
        """
        Return the shape of the smallest captured step that a batch fits into; None if it must run
        eagerly.

        Args:
            batch: The batch, with rows of any kind.
            rows: Its rows that sample.
        """
        is_prefill = (batch.row_num_tokens > 1) | ((batch.row_flags & ROW_SAMPLES) == 0)
        num_prefills = int(is_prefill.sum())
        found = match(
            self._graphs.keys,
            num_tokens=batch.num_tokens,
            num_prefills=num_prefills,
            num_decodes=len(is_prefill) - num_prefills,
        )
        can_draw = self._sampling.drawn_by_graphs(
            rows.slot, rows.position, margin_eps=self._margin_eps
        )
        return found if num_prefills and can_draw else None

    def launch(
        self,
        shape: GraphShape,
        batch: Batch,
        rows: SamplingRows,
        slots: SlotState,
        queue: DeviceQueue,
    ) -> Launched:
        """
        Launch a step on the device.

        Args:
            shape: Shape that `shape_for` found for it.
            batch: The batch, already applied to `slots`.
            rows: Its rows that sample.
            slots: Slot state with the block tables.
            queue: The device's queue.
        """
        self._step.prepare(batch, rows, slots, self._sampling, shape)
        started = queue.mark()
        self._graphs.replay(shape)
        told = self._step.tokens(len(rows.slot))
        return Launched(
            fetch=partial(fetch_tokens, told),
            started=started,
            forwarded=queue.mark(),
            graph=shape.num_tokens,
        )
