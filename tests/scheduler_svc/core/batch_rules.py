"""Rules for every batch, in terms of the slots before and after it, apart from the planner."""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.queue.queue import AGED_AFTER
from scheduler_svc.core.request.events import CoreEvents
from scheduler_svc.core.request.options import StepPriority
from scheduler_svc.core.request.request import RequestState
from tandem.link.batch import Batch


class BatchRules:
    """
    Limits of one core, checked batch by batch.

    Made before the batch is planned. `waited` says how long each handle has waited in all, as the
    rig has seen it.
    """

    def __init__(self, core, waited: dict[int, float]) -> None:
        self.replica = core._replica
        self.options, self.limits = self.replica.cell.options, self.replica.limits
        aged_s = AGED_AFTER * self.options.ageing_s
        self.is_trial = core.stats().suspected_requests > 0
        self.num_in_flight = core.num_inflight
        self.num_decoding = self.replica.slots.num_decoding
        live = self.replica.cell.requests
        self.ran = {one.number for one in live if one.times.scheduled_s is not None}
        fresh = [one for one in self.replica.cell.queue if one.number not in self.ran]
        self.is_one_tenant = len({one.new.tenant for one in fresh}) < 2
        self.aged = [
            request
            for handle, request in self.replica.cell.requests._by_handle.items()
            if request.state is RequestState.WAITING
            and waited.get(handle, 0.0) >= aged_s
            and not self.is_trial
        ]

    def check(self, batch: Batch) -> None:
        """Check a batch that was just planned."""
        slots, slot = self.replica.slots, batch.row_slot
        is_prefill = batch.row_start < slots.admitted.known_len[slot]
        prefill_tokens = batch.row_num_tokens[is_prefill]
        num_decodes = int((~is_prefill).sum())
        max_rows = self.replica.room.rows(self.limits.max_running)
        max_tokens = self.replica.room.tokens(self.limits.max_total_tokens)
        assert len(slot) <= max_rows, "more rows than max_batch_size, or than there is memory for"
        assert batch.num_tokens <= max_tokens, "over max_total_tokens, or what there is memory for"
        assert len(self.replica.cell.requests._by_handle) <= self.limits.max_num_seqs, (
            "over max_num_seqs"
        )
        assert (batch.row_num_tokens[~is_prefill] == 1).all(), "a decode of several tokens"
        if self.options.chunked_prefill_size is not None:
            longest = max(prefill_tokens, default=0)
            assert longest <= self.options.chunked_prefill_size, "a chunk is too long"
        if num_decodes:
            share = max(1, int(self.options.max_prefill_share * max_tokens))
            assert prefill_tokens.sum() <= share, "prompts got more than their share"
        if self.options.step_priority is StepPriority.DECODE_FIRST and len(prefill_tokens):
            assert not self.left_out(batch, of_lane=True), "a prefill ran before a decode"
        if (
            self.is_trial and self.replica.cell.suspects.num_suspects
        ):  # A deadline may have ended it.
            tried = set(self.replica.cell.suspects.trial)
            is_alone = not self.num_in_flight or not len(slot)  # Releases alone disturb no trial.
            assert is_alone, "a trial of several steps at a time"
            assert tried.issuperset(slots.admitted.number[slot].tolist()), "a trial is not alone"
        self._check_threshold(batch)
        self._check_nobody_passes_the_aged(batch)

    def left_out(self, batch: Batch, *, of_lane: bool = False) -> list[tuple[int, int]]:
        """
        Return slot and generation of each decode that has something to compute and no row, of all
        lanes or of the batch's alone.
        """
        slots = self.replica.slots
        is_ready = slots.running & slots.decoding & (slots.planned < slots.admitted.stop_len - 1)
        is_ready[batch.row_slot] = False
        ready = np.flatnonzero(is_ready)
        if of_lane:
            ready = slots.with_turn(ready)
        return [(slot, int(slots.generation[slot])) for slot in ready.tolist()]

    def max_left_out(self) -> int:
        """
        Return for how many batches in a row a decode that its lane may compute may be left out, as
        rows and lanes take turns.
        """
        num_turns = 2 * -(-self.limits.max_running // self.limits.max_total_tokens) + 1
        return num_turns * self.limits.num_stages

    def _check_nobody_passes_the_aged(self, batch: Batch) -> None:
        """
        Check that a request that has waited long is passed only by those that arrived before, and
        by those of other tenants, as tenants take turns.
        """
        left = [r for r in self.aged if r.state is RequestState.WAITING]
        for admission in batch.admits:
            request = self.replica.slots.request_of(admission.slot)
            is_new = request.number not in self.ran
            passed = [
                r.number
                for r in left
                if self.is_one_tenant
                or r.number in self.ran
                or (is_new and r.new.tenant == request.new.tenant)
            ]
            number = request.number
            assert number < min(passed, default=number + 1), "an aged request is passed"

    def _check_threshold(self, batch: Batch) -> None:
        """Check that none is admitted while running requests hold what the threshold allows."""
        if not batch.admits:
            return
        admitted = {admission.slot for admission in batch.admits}
        slots, held = self.replica.slots, set()
        for slot in np.flatnonzero(slots.live).tolist():
            if slot not in admitted:
                held.update(slots.blocks.table[slot, : slots.blocks.num_blocks[slot]].tolist())
        if self.options.step_priority is StepPriority.PREFILL_FIRST:
            held.difference_update(batch.append_block.tolist())  # taken after the admissions
        usage = len(held) / self.limits.num_blocks
        assert usage < self.limits.memory_threshold, "admission over memory_threshold"


class LaneRules:
    """
    Lanes of one core's decodes as its batches show them; trivial for one stage.

    A decode is *held* while a step is in flight that computes it in another lane than it is in. Any
    other decode with tokens left to compute is ready, and a lane with one takes its turns: it is
    decoded by one of the next N batches of N lanes, and meanwhile none of the others decodes the
    same slot twice. Where prompts go first, a batch that they fill costs its lane the turn.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], tuple[int, int]] = {}
        """Lane and number of the batch that computed each decode last, by slot and generation."""
        self._paused: set[tuple[int, int]] = set()
        """Decodes that were paused at the last batch, by slot and generation."""
        self._waits: dict[tuple[int, int, int], int] = {}
        """
        Number of the batch since which each ready decode has waited for its lane's turn, by slot,
        generation and lane.
        """
        self._num_batches = 0
        self._slots = None

    def check(self, core, batch: Batch, num_decoding: int) -> None:
        """Check a batch that was just planned, with so many decodes before."""
        replica = core._replica
        slots = replica.slots
        if replica.limits.num_stages == 1:
            return
        if self._slots is not slots:  # the executor was lost: generations start over
            self._slots, self._last, self._paused, self._waits = slots, {}, set(), {}
        self._num_batches += 1
        is_decode = batch.row_start >= slots.admitted.known_len[batch.row_slot]
        decodes = [
            (slot, int(slots.generation[slot])) for slot in batch.row_slot[is_decode].tolist()
        ]
        # Decodes that the plan itself preempts or pauses counted when it took the lane's turn.
        self._check_shares(replica, decodes, max(num_decoding, slots.num_decoding))
        self._note_waits(replica, batch, decodes)
        self._check_turns(replica, decodes)
        self._last |= dict.fromkeys(decodes, (slots._lanes.turn, self._num_batches))

    def is_held(self, slots, slot: int) -> bool:
        """Return True for a decode with results under way that its lane has not computed yet."""
        if slots.num_lanes() == 1 or slots.planned[slot] == slots.tokens.applied[slot]:
            return False
        last = self._last.get((slot, int(slots.generation[slot])))
        return last is None or last[0] != slots._lanes._lane[slot]

    def _check_shares(self, replica, decodes: list[tuple[int, int]], num_decoding: int) -> None:
        """Check that a step decodes one lane, and no more than that lane's share."""
        slots = replica.slots
        lanes = {int(slots._lanes._lane[slot]) for slot, _ in decodes}
        assert lanes <= {slots._lanes.turn}, "a step decodes another lane than that of its turn"
        most = -(-num_decoding // replica.limits.num_stages)
        assert len(set(decodes) - self._paused) <= most, "a lane decodes more than its share"
        self._paused = {(slot, int(slots.generation[slot])) for slot in replica.paused}

    def _note_waits(self, replica, batch: Batch, decodes: list[tuple[int, int]]) -> None:
        """Note since when each lane is left out; check that it is not for long."""
        slots, before = replica.slots, self._waits
        is_filled = not decodes and len(batch.row_slot) and not replica.cell.options.decodes_first
        if is_filled:
            before = {}
        ready = slots.running & slots.decoding & (slots.planned < slots.admitted.stop_len - 1)
        resumed = set(batch.append_slot.tolist())
        self._waits = {}
        for slot in np.flatnonzero(ready).tolist():
            key = slot, int(slots.generation[slot]), int(slots._lanes._lane[slot])
            if self.is_held(slots, slot) or (decodes and key[2] == slots._lanes.turn):
                continue
            # One that gets a block without a row was paused, so that its lane may have had no turn.
            since = self._num_batches if slot in resumed else before.get(key, self._num_batches)
            self._waits[key] = since
            assert self._num_batches - since < slots.num_lanes(), "a lane starves"

    def _check_turns(self, replica, decodes: list[tuple[int, int]]) -> None:
        """
        Check that no decode moved lanes while in flight, and that none is computed again before the
        turn of each other lane that was ready when it was computed.
        """
        in_flight = {
            key for rows in list(replica.steps.in_flight)[:-1] for key, _ in rows.tokens_by_key()
        }
        longest = min(self._waits.values(), default=self._num_batches)
        for key in decodes:
            lane, number = self._last.get(key, (replica.slots._lanes.turn, -1))
            is_own = lane == replica.slots._lanes.turn
            assert is_own or key not in in_flight, "a decode moved lanes while in flight"
            assert number < longest, "a decode is computed again before another lane's turn"


class RepeatedRows:
    """Rows of batches and handles of tokens as they were when each version was first seen."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[bytes, ...]] = {}
        self._handles: dict[int, bytes] = {}

    def check_batch(self, batch: Batch) -> None:
        """Assert that a batch has the rows that its version had before."""
        rows = tuple(
            column.tobytes() for column in (batch.row_slot, batch.row_num_tokens, batch.row_flags)
        )
        if batch.rows_version:
            before = self._rows.setdefault(batch.rows_version, rows)
            assert before == rows, "other rows under one version"

    def check_tokens(self, events: CoreEvents) -> None:
        """Assert that tokens have the handles that their version had before."""
        if events.token_version:
            handles = events.token_handle.tobytes()
            before = self._handles.setdefault(events.token_version, handles)
            assert before == handles, "other handles under one version"
