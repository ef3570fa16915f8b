"""Bugs planted one at a time into the link's parts, to prove that the model notices each of them."""

from __future__ import annotations

import numpy as np

from tandem.link.codec.wire import decode_request, encode_step
from tandem.link.executor_end import ExecutorEnd
from tandem.link.results import StepFailed
from tandem.link.scheduler_end import LinkState, SchedulerEnd
from tandem.link.slots.slot_state import SlotState
from tandem.link.slots.state_hash import block_terms
from tests.link.model.fake_executor import FakeExecutor
from tests.link.model.model_requests import Place
from tests.link.model.model_scheduler import ModelScheduler
from tests.link.model.world import Parts


class TakesDuplicateSteps(ExecutorEnd):
    def receive(self, step, raw, attach_id, now):
        return super().receive(step, raw, attach_id, now) or step.step_id > self.acked_step_id


class TakesStepsOfAnySession(ExecutorEnd):
    def _check_session(self, boot_id, session_epoch):
        if boot_id != self.boot_id:
            super()._check_session(boot_id, session_epoch)


class TakesOldStreams(ExecutorEnd):
    def receive(self, step, raw, attach_id, now):
        return super().receive(step, raw, self._newest_attach_id, now)


class ReplaysNoResult(ExecutorEnd):
    def attach(self, attach, now):
        return super().attach(attach, now)[0], []


class ForgetsSentResults(ExecutorEnd):
    def complete(self, session_epoch, step_id, encoded_result, *, failed=False):
        should_send = super().complete(session_epoch, step_id, encoded_result, failed=failed)
        if should_send:
            self._results.pop(step_id, None)
            self._acknowledge_without_results(step_id)
        return should_send

    def _acknowledge_without_results(self, step_id):
        self._received.pop(step_id, None)

    def _acknowledge(self, acked):
        self.acked_step_id = max(self.acked_step_id, acked)


class KeepsResultsOfFencedSessions(ExecutorEnd):
    def complete(self, session_epoch, step_id, encoded_result, *, failed=False):
        return super().complete(self.session_epoch, step_id, encoded_result, failed=failed)


class GoesOnAfterAFailure(ExecutorEnd):
    def complete(self, session_epoch, step_id, encoded_result, *, failed=False):
        return super().complete(session_epoch, step_id, encoded_result)


class RunsQueuedStepsAfterAFailure(ExecutorEnd):
    @property
    def can_execute(self):
        return True


class IgnoresLeases(ExecutorEnd):
    def open_session(self, scheduler, take_over, lease_s, now):
        return super().open_session(scheduler, True, lease_s, now)


class KnowsNoHeirs(ExecutorEnd):
    def _is_heir(self, scheduler):
        return False


class LetsHeirsOfTheLivingIn(ExecutorEnd):
    def _is_heir(self, scheduler):
        return scheduler.name == self.holder.name and scheduler not in self._fenced


class LetsTheFencedInherit(ExecutorEnd):
    def _is_heir(self, scheduler):
        return scheduler.name == self.holder.name and not self.attach_id


class KnowsOnlyNames(ExecutorEnd):
    """An end that takes every incarnation for the holder itself."""

    def open_session(self, scheduler, take_over, lease_s, now):
        is_namesake = self.holder is not None and scheduler.name == self.holder.name
        return super().open_session(scheduler, take_over or is_namesake, lease_s, now)


class DetachesByIdAlone(ExecutorEnd):
    def detach(self, session_epoch, attach_id):
        super().detach(self.session_epoch, attach_id)


class DetachesWhicheverStreamEnds(ExecutorEnd):
    def detach(self, session_epoch, attach_id):
        self.attach_id = 0


class KeepsEpoch(ExecutorEnd):
    def open_session(self, scheduler, take_over, lease_s, now):
        epoch = super().open_session(scheduler, take_over, lease_s, now)
        self.session_epoch = max(1, epoch - 1)
        return self.session_epoch


class ResendsNothing(SchedulerEnd):
    def on_attached(self, attached):
        super().on_attached(attached)
        return []


class ResendsEverythingAnew(SchedulerEnd):
    """An end that encodes steps in flight again, with the results acknowledged by now."""

    def on_attached(self, attached):
        missing = super().on_attached(attached)
        again = []
        for raw in self._sent.values() if self.state is LinkState.ATTACHED else missing:
            step = decode_request(raw)
            again.append(
                encode_step(
                    type(step)(
                        session_epoch=step.session_epoch,
                        step_id=step.step_id,
                        acked_step_id=self.last_applied_step_id,
                        state_hash=step.state_hash,
                        command=step.command,
                    )
                )
            )
        return again


class AppliesDuplicateResults(SchedulerEnd):
    def on_result(self, result):
        return super().on_result(result) or self.state is LinkState.ATTACHED


class AcknowledgesWhatItSent(SchedulerEnd):
    def attach(self):
        attach = super().attach()
        return type(attach)(
            boot_id=attach.boot_id,
            session_epoch=attach.session_epoch,
            attach_id=attach.attach_id,
            acked_step_id=self.last_sent_step_id,
        )


class SkipsLostResults(SchedulerEnd):
    def on_result(self, result):
        self.last_applied_step_id = max(self.last_applied_step_id, result.step_id - 1)
        self._sent.setdefault(result.step_id, b"")
        return super().on_result(result)


class IgnoresFailures(SchedulerEnd):
    def on_result(self, result):
        return not isinstance(result, StepFailed) and super().on_result(result)


class SpendsTooMuchCredit(SchedulerEnd):
    @property
    def can_send(self):
        return self.state is LinkState.ATTACHED and self.num_inflight <= self._max_inflight_steps


class NumbersStepsAgainAfterAttach(SchedulerEnd):
    def detach(self):
        super().detach()
        self._sent.clear()
        self.last_sent_step_id = self.last_applied_step_id


class HashIgnoresAppendedBlocks(SlotState):
    def _append(self, slot, block):
        index = self.num_blocks_held[slot].copy()
        super()._append(slot, block)
        self._hash.remove(int(block_terms(slot, index, block).sum()))


class HashIgnoresReleases(SlotState):
    def _release(self, slot):
        before = self._hash.value
        super()._release(slot)
        self._hash.value = before


class KeepsSlotsAcrossSessions(SlotState):
    def reset(self):
        pass


class AppendsToTheWrongPlace(SlotState):
    def _append(self, slot, block):
        super()._append(slot, block)
        for each in set(slot.tolist()):
            held = self.num_blocks_held[each]
            self.block_table[each, :held] = np.roll(self.block_table[each, :held], 1)


class ReusesBlocksInUse(ModelScheduler):
    def _take_block(self):
        block = super()._take_block()
        if self.free_blocks and self.rows:
            self.free_blocks.append(next(iter(self.rows.values())).blocks[0])
        return block

    def check(self):
        """Accept wrong bookkeeping, so that the executor's end has to notice."""


class UncheckedSlots(SlotState):
    """Slots that apply batches unchecked, so that the KV memory has to notice."""

    def apply(self, batch):
        for slot in batch.release_slot.tolist():
            self._release(slot)
        for admission in batch.admits:
            self._admit(admission)
        self._append(batch.append_slot, batch.append_block)
        self._advance(batch)


class CopiesNothing(ModelScheduler):
    """
    A scheduler without copy on write: the child's fresh block lacks the content of its parent's
    last.
    """

    def _admit(self, request, chunk, written, plan):
        admitted = super()._admit(request, chunk, written, plan)
        plan.copies.clear()
        return admitted


class SharesBeforeWritten(ModelScheduler):
    def _cached(self, request, written):
        now = {row.slot: row.planned for row in self.rows.values()}
        return super()._cached(request, now)


class AdmitsWhileDraining(ModelScheduler):
    def _place_after_preemption(self, request):
        return Place.WAITING


class ReusesGenerations(ModelScheduler):
    def _admit(self, request, chunk, written, plan):
        self.generations = [max(0, generation - 1) for generation in self.generations]
        return super()._admit(request, chunk, written, plan)


class KeepsOutputsOfLostSteps(ModelScheduler):
    """A scheduler that keeps a wrong newest output after a lost session."""

    def forget_executor(self):
        super().forget_executor()
        for request in self.requests:
            if request.place is Place.WAITING and request.outputs:
                request.outputs.pop()
                request.outputs.append(1)


class PurgesNothing(FakeExecutor):
    def purge(self):
        pass


class LeavesFencedStreamsOpen(FakeExecutor):
    def end_stream(self, why):
        pass


class SkipsCopies(FakeExecutor):
    def copy_blocks(self, batch):
        pass


class CopiesInReverse(FakeExecutor):
    def copy_blocks(self, batch):
        swapped = type(batch)(
            copy_source=batch.copy_destination, copy_destination=batch.copy_source
        )
        super().copy_blocks(swapped)


class SkipsSwapsOut(FakeExecutor):
    def swap_out(self, batch):
        pass


class SkipsSwapsIn(FakeExecutor):
    def swap_in(self, batch):
        pass


class SwapsOutLast(FakeExecutor):
    def forward(self, batch):
        drawn = super().forward(batch)
        super().swap_out(batch)
        return drawn

    def swap_out(self, batch):
        pass


class SwapsOutOneBlockShort(FakeExecutor):
    def swap_out(self, batch):
        self.move(self.kv, batch.swap_out_block[:-1], self.host_kv, batch.swap_out_host[:-1])


class ReadsHostBlocksOfTheLastSession(ModelScheduler):
    def forget_executor(self):
        saved = getattr(self, "saved", {})
        super().forget_executor()
        for request, one in saved.items():
            if request.place is Place.WAITING:
                self.saved[request] = one
                for host in one.host_blocks:
                    self.free_host_blocks.remove(host)


class SwapsInAtOnce(ModelScheduler):
    """A scheduler that reads host blocks in the very batch that writes them."""

    def _admit(self, request, chunk, written, plan):
        swaps_out, plan.swaps_out = plan.swaps_out, []
        admitted = super()._admit(request, chunk, written, plan)
        plan.swaps_out = swaps_out
        return admitted


class ForgetsSampledTokens(FakeExecutor):
    def forward(self, batch):
        drawn = super().forward(batch)
        for slot, _, _, _ in drawn[1:2]:
            self.tokens[slot][-1] = 1
        return drawn


class LosesAnEmptySuspension(FakeExecutor):
    def reset(self):
        kept = getattr(self, "suspended", None)
        super().reset()
        self.suspended = kept


PLANTED = {
    planted.__name__: Parts(**{part: planted})
    for part, bugs in {
        "executor_end": (
            TakesDuplicateSteps,
            TakesStepsOfAnySession,
            TakesOldStreams,
            ReplaysNoResult,
            ForgetsSentResults,
            KeepsResultsOfFencedSessions,
            GoesOnAfterAFailure,
            RunsQueuedStepsAfterAFailure,
            IgnoresLeases,
            KnowsNoHeirs,
            LetsHeirsOfTheLivingIn,
            LetsTheFencedInherit,
            KnowsOnlyNames,
            DetachesByIdAlone,
            DetachesWhicheverStreamEnds,
            KeepsEpoch,
        ),
        "scheduler_end": (
            ResendsNothing,
            ResendsEverythingAnew,
            AppliesDuplicateResults,
            AcknowledgesWhatItSent,
            SkipsLostResults,
            IgnoresFailures,
            SpendsTooMuchCredit,
            NumbersStepsAgainAfterAttach,
        ),
        "slots": (
            HashIgnoresAppendedBlocks,
            HashIgnoresReleases,
            KeepsSlotsAcrossSessions,
            AppendsToTheWrongPlace,
        ),
        "scheduler": (
            ReusesBlocksInUse,
            CopiesNothing,
            SharesBeforeWritten,
            AdmitsWhileDraining,
            ReusesGenerations,
            KeepsOutputsOfLostSteps,
            ReadsHostBlocksOfTheLastSession,
            SwapsInAtOnce,
        ),
        "executor": (
            PurgesNothing,
            LeavesFencedStreamsOpen,
            SkipsCopies,
            CopiesInReverse,
            ForgetsSampledTokens,
            LosesAnEmptySuspension,
            SkipsSwapsOut,
            SkipsSwapsIn,
            SwapsOutLast,
            SwapsOutOneBlockShort,
        ),
    }.items()
    for planted in bugs
} | {
    "ReusesBlocksInUse on trust": Parts(scheduler=ReusesBlocksInUse, slots=UncheckedSlots),
    "SharesBeforeWritten on trust": Parts(scheduler=SharesBeforeWritten, slots=UncheckedSlots),
}
