"""Launch of decode steps that run in static buffers, and drawing of their tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from executor_svc.device.queue import DeviceQueue
from executor_svc.slots.sampling import SlotSampling
from executor_svc.slots.tokens import SlotTokens
from executor_svc.step.batch_inputs import SamplingRows
from executor_svc.step.pending_step import Launched, fetch_sampled, fetch_tokens
from executor_svc.step.static_step import DecodeStep, Drawing
from tandem.link.batch import ROW_SAMPLES, Admission, Batch
from tandem.link.slots.slot_state import SlotState

Run = Callable[[int, Drawing], int]
"""
Function that launches the prepared step of so many rows, padded if need be; returns the number of
rows of the captured graph that it replays, 0 if it runs eagerly.
"""


class StaticDecodes:
    """
    Steps in which every row computes one token and draws the next.

    If a row needs something that the step does not compute, as `SlotSampling.drawn_by_graphs` tells
    (edits of logits, logprobs, margins), the tokens of all rows are drawn outside it, from its
    logits.
    """

    def __init__(
        self,
        step: DecodeStep,
        tokens: SlotTokens,
        sampling: SlotSampling,
        *,
        margin_eps: float | None,
        run: Run | None = None,
    ) -> None:
        """
        Args:
            step: The step; only this object prepares its buffers.
            tokens: Token histories of the slots.
            sampling: Sampling parameters of the slots.
            margin_eps: Logit noise for margins, as in `sample`; None computes no margins.
            run: Launches a step; None runs the step eagerly and without padding.
        """
        self.step = step
        self._tokens = tokens
        self._sampling = sampling
        self._margin_eps = margin_eps
        self._run = run or partial(_run_plainly, step)

    def takes(self, batch: Batch) -> bool:
        """Tell whether every row of a batch is a decode, and the step has room for all."""
        num_rows = len(batch.row_slot)
        return (
            0 < num_rows <= self.step.max_rows
            and bool((batch.row_num_tokens == 1).all())
            and bool((batch.row_flags & ROW_SAMPLES).all())
        )

    def admit(self, admission: Admission) -> None:
        """Note that a slot has a new sequence."""
        self.step.admitted(admission.slot)

    def forget(self) -> None:
        """Forget all slots."""
        self.step.forget()

    def launch(
        self, batch: Batch, rows: SamplingRows, slots: SlotState, queue: DeviceQueue
    ) -> Launched:
        """
        Launch a step on the device.

        Args:
            batch: A batch for which `takes` is true, already applied to `slots`.
            rows: All of its rows.
            slots: Slot state with the block tables.
            queue: The device's queue.

        Returns:
            The launched step, to be fetched before `RING_LINES` more steps are launched.
        """
        self.step.prepare(rows.slot, batch.row_start, slots, self._sampling)
        num_rows = len(rows.slot)
        sampling, margin_eps = self._sampling, self._margin_eps
        if sampling.drawn_by_graphs(rows.slot, rows.position, margin_eps=margin_eps):
            drawing = Drawing.FILTERED if sampling.has_filters(rows.slot) else Drawing.PLAIN
            started = queue.mark()
            graph = self._run(num_rows, drawing)
            fetch = partial(fetch_tokens, self.step.launched())
            return Launched(fetch=fetch, started=started, forwarded=queue.mark(), graph=graph)
        started = queue.mark()
        graph = self._run(num_rows, Drawing.OUTSIDE)
        forwarded = queue.mark()
        sampled = sampling.draw(
            self.step.logits(num_rows),
            rows.slot,
            rows.position,
            self._tokens,
            margin_eps=margin_eps,
            shard=self.step.shard,
        )
        self.step.finish(sampled.token, sampled.valid)
        self.step.launched()
        fetch = partial(fetch_sampled, sampled)
        return Launched(fetch=fetch, started=started, forwarded=forwarded, graph=graph)


def _run_plainly(step: DecodeStep, num_rows: int, drawing: Drawing) -> int:
    """
    Run a step eagerly. This is no method: an object that kept one of its own would refer to itself,
    and its buffers would outlive their last user until garbage is collected.
    """
    step.run(num_rows, drawing)
    return 0
