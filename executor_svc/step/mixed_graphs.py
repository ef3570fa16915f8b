"""Steps with prompts: which of them run as captured graphs."""

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
from tandem.link.slot_state import SlotState


class MixedGraphs:
    """
    The captured steps of a runner that compute prompts, with decodes beside them or without: a step
    runs in the smallest that has room for it.

    Every token is worked on alike, so that decodes may take the room of prefills. Rows that ask for
    edits of logits, log probabilities or margins keep their step out.
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
            step: Runs on the plan's device; its buffers are this object's to prepare.
            plan: What to capture.
            sampling: Parameters of the slots.
            margin_eps: Not None where every token is told its margin.
        """
        self._step = step
        self._sampling = sampling
        self._has_margins = margin_eps is not None
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
        The smallest captured step that a batch fits into; None: it runs eagerly.

        Args:
            batch: Its rows may be of any kind.
            rows: Those that sample.
        """
        is_prefill = (batch.row_num_tokens > 1) | ((batch.row_flags & ROW_SAMPLES) == 0)
        num_prefills = int(is_prefill.sum())
        found = match(
            self._graphs.keys,
            num_tokens=batch.num_tokens,
            num_prefills=num_prefills,
            num_decodes=len(is_prefill) - num_prefills,
        )
        can_draw = not self._has_margins and not self._sampling.asks_for_more(rows.slot)
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
        Give a step to the device.

        Args:
            shape: What `shape_for` found for it.
            batch: Applied to `slots`.
            rows: Those that sample.
            slots: Give the block tables.
            queue: The device's.
        """
        self._step.prepare(batch, rows, slots, self._sampling, shape)
        self._graphs.replay(shape)
        told = self._step.tokens(len(rows.slot))
        return Launched(
            fetch=partial(fetch_tokens, told), forwarded=queue.mark(), graph=shape.num_tokens
        )
