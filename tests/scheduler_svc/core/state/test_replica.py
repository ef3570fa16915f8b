"""One executor as the core knows it: requests by their results, and moves out of their slots."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core.request.options import CoreOptions, PreemptionMode
from scheduler_svc.core.request.request import FinishReason, RequestState
from scheduler_svc.core.slots.planned_rows import PlannedRows
from tandem.link.commands import KvMode
from tests.scheduler_svc.core.harness import Rig, small_config

OPTIONS = CoreOptions(schedule_conservativeness=0.0, track_request_events=True)


def decoding(count: int = 2, *, delay: int = 1, options: CoreOptions = OPTIONS, **config) -> Rig:
    """Return a rig in which so many requests decode, request i in slot i."""
    rig = Rig(small_config(**config), delay=delay, options=options)
    for _ in range(count):
        rig.submit(prompt_len=5, max_tokens=30)
    for _ in range(4):
        rig.step()
    assert [RequestState.DECODE] * count == [rig.core.state_of(i) for i in range(count)]
    return rig


def kinds_of(rig: Rig, request_id: str) -> list[tuple[str, str]]:
    """Return kind and detail of a request's events."""
    return [(event.kind.name, event.detail) for event in rig.core.request_events(request_id)]


class TestRequestAt:
    def test_results_belong_to_the_request_in_their_slot(self):
        """
        A result's slot and generation name the request that runs there under that generation.
        """
        replica = decoding().core._replica
        generation = int(replica.slots.generation[1])
        assert replica.slots.request_of(1) is replica.request_at(1, generation)
        assert replica.request_at(1, generation - 1) is None
        assert replica.request_at(1, generation + 1) is None

    def test_results_of_a_draining_request_are_still_its_own(self):
        """
        Results in flight belong to the request that lost the slot, also when the slot has another
        generation by then.
        """
        rig = decoding(delay=3)
        replica = rig.core._replica
        victim, key = replica.slots.request_of(0), replica.slots.request_of(0).place.key
        replica.preempt(0)
        assert RequestState.DRAINING is victim.state
        assert victim is replica.request_at(*key)
        assert replica.request_at(key[0], key[1] + 1) is None

    def test_results_of_a_request_that_ended_belong_to_none(self):
        """
        A slot whose request is gone, or that never had one, has no results of a live request.
        """
        rig = decoding()
        replica = rig.core._replica
        key = replica.slots.request_of(0).place.key
        replica.drop(replica.slots.request_of(0))
        assert replica.request_at(*key) is None
        assert replica.request_at(3, 0) is None


class TestFullness:
    def test_an_executor_with_requests_is_full_until_one_leaves(self):
        """
        A request that does not fit beside running ones closes admission until one of them is gone.
        """
        replica = decoding().core._replica
        replica.gate.note_full(replica.slots.num_running)
        assert replica.gate.is_full
        replica.preempt(0)
        assert not replica.gate.is_full

    def test_an_empty_executor_is_never_full(self):
        """
        Admission stays open where no running request could make room by leaving.
        """
        replica = Rig(options=OPTIONS).core._replica
        replica.gate.note_full(replica.slots.num_running)
        assert not replica.gate.is_full

    def test_a_waiting_request_that_ends_opens_admission(self):
        """
        The request that did not fit may be the one that leaves.
        """
        rig = decoding(4)
        waiting = rig.submit()
        replica = rig.core._replica
        replica.gate.note_full(replica.slots.num_running)
        rig.core.end_request(f"r{waiting}", FinishReason.CANCELLED, rig.now)
        assert not replica.gate.is_full

    @pytest.mark.parametrize(
        ("threshold", "expected"), [(0.125, True), (0.126, False)], ids=["reached", "below"]
    )
    def test_pressure_begins_at_the_threshold(self, threshold, expected):
        """
        An executor is under pressure from the share of used blocks that is the threshold on.
        """
        replica = decoding().core._replica
        replica.limits = replace(replica.limits, memory_threshold=threshold)
        assert 4 / 32 == replica.kv.pool.usage
        assert expected == replica.under_pressure()

    def test_a_better_request_opens_admission(self):
        """
        A full executor looks at the queue again when a request came that may make others give way.
        """
        replica = decoding().core._replica
        replica.gate.note_full(replica.slots.num_running)
        replica.gate.reopen()
        assert not replica.gate.is_full


class TestInFlight:
    def test_results_come_in_the_order_of_the_batches(self):
        """
        A batch is in flight until its result is applied, the oldest first, and each result counts.
        """
        replica = Rig(options=OPTIONS).core._replica
        first, second = PlannedRows.none(0), PlannedRows.none(0)
        replica.steps.note_sent(first)
        replica.steps.note_sent(second)
        assert [first, second] == list(replica.steps.in_flight)
        replica.steps.note_result()
        assert [second] == list(replica.steps.in_flight)
        assert 1 == replica.cell.telemetry.counters.compute.steps


class TestGiveWay:
    def test_the_worst_and_then_the_latest_gives_way_first(self):
        """
        Requests that may give way stand by priority, worst first, and among equals latest first.
        """
        rig = Rig(small_config(max_total_tokens=64), options=OPTIONS)
        for priority in (1, 3, 3, 2):
            rig.submit(prompt_len=5, max_tokens=30, priority=priority)
        rig.step()
        replica = rig.core._replica
        for request in replica.slots.running_requests():
            replica.let_give_way(request)
        assert [2, 1, 3, 0] == [request.new.handle for request in replica.may_give_way]
        rig.core.preempt("r2")
        assert [1, 3, 0] == [request.new.handle for request in replica.may_give_way]


class TestPreempt:
    def test_a_request_without_results_in_flight_waits_at_once(self):
        """
        A preempted request waits again, and its preemption is counted and recorded as retraction.
        """
        rig = decoding()
        rig.core._replica.preempt(0)
        assert RequestState.WAITING is rig.core.state_of(0)
        assert [0] == rig.core.waiting_handles()
        assert ("RETRACT", "out of memory") in kinds_of(rig, "r0")
        counters = rig.core._cell.telemetry.counters.preemption
        assert (1, 0) == (counters.preemptions, counters.swap_fallbacks)

    def test_a_paused_request_is_evicted(self):
        """
        The preemption of a paused request is recorded as eviction, and the request is not paused
        any more.
        """
        rig = decoding()
        replica = rig.core._replica
        replica.pause(0)
        assert RequestState.PAUSED is rig.core.state_of(0)
        replica.preempt(0)
        assert {} == replica.paused
        assert "EVICT" in [kind for kind, _ in kinds_of(rig, "r0")]
        assert "RETRACT" not in [kind for kind, _ in kinds_of(rig, "r0")]

    def test_a_request_without_host_blocks_is_recomputed(self):
        """
        A preemption that was to swap and found no host blocks says so, and counts as fallback.
        """
        swap = replace(OPTIONS, preemption_mode=PreemptionMode.SWAP)
        rig = decoding(options=swap)
        assert PreemptionMode.RECOMPUTE is rig.core._replica.preempt(0)
        assert 1 == rig.core._cell.telemetry.counters.preemption.swap_fallbacks
        rig.run()
        assert rig.expected(0) == rig.outputs[0]

    def test_a_paused_request_goes_on_where_it_was(self):
        """
        A paused request has no row until it is resumed, and then produces what it always would.
        """
        rig = decoding()
        replica = rig.core._replica
        replica.pause(0)
        replica.unpause(0)
        assert RequestState.DECODE is rig.core.state_of(0)
        assert {} == replica.paused
        assert [0, 1] == rig.step().row_slot.tolist()
        rig.run()
        assert rig.expected(0) == rig.outputs[0]


class TestStartOver:
    def test_requests_wait_with_their_outputs_and_lose_their_slots(self):
        """
        The loss of an executor puts running and draining requests back in the queue in the order
        of arrival, and is recorded for those that ran.
        """
        rig = decoding(3, delay=3)
        replica = rig.core._replica
        replica.preempt(0)
        outputs = rig.core.outputs(1)
        replica.start_over(replica.limits)
        assert ({}, 0, 0) == (
            replica.draining,
            len(replica.steps.in_flight),
            replica.slots.num_running,
        )
        assert [0, 1, 2] == rig.core.waiting_handles()
        assert outputs == rig.core.outputs(1)
        assert ("RETRACT", "executor lost") in kinds_of(rig, "r1")
        assert ("RETRACT", "executor lost") not in kinds_of(rig, "r0")

    def test_versions_go_on(self):
        """
        Decode rows and prefix cache of the next executor have versions that none before had.
        """
        rig = decoding()
        replica = rig.core._replica
        version, cache_version = (
            replica.slots.decode_rows().version,
            replica.kv.prefix_cache.version,
        )
        replica.start_over(replica.limits)
        assert replica.slots.next_version() > version
        assert replica.kv.prefix_cache.version > cache_version

    def test_kv_of_the_lost_executor_has_no_writers_any_more(self):
        """
        A request that is computed anew rests on no KV that another request wrote.
        """
        rig = decoding()
        replica = rig.core._replica
        replica.slots.request_of(0).prefix.writers = frozenset({9})
        replica.start_over(replica.limits)
        assert [frozenset()] * 2 == [request.prefix.writers for request in replica.cell.requests]

    def test_digests_last_as_long_as_the_block_size(self):
        """
        Digests of blocks are kept for an executor with equal blocks, and made anew for others.
        """
        rig = decoding()
        replica = rig.core._replica
        request = replica.slots.request_of(0)
        request.new = replace(request.new, block_digests=b"d" * 32)
        digests = list(request.prefix.digests)
        assert digests
        replica.start_over(replica.limits)
        assert (digests, b"d" * 32) == (request.prefix.digests, request.new.block_digests)
        replica.start_over(replace(replica.limits, block_size=8))
        assert ([], b"") == (request.prefix.digests, request.new.block_digests)

    def test_the_next_executor_is_told_of_a_suspension(self):
        """
        A suspension outlasts the executor, and the next executor gets the command again.
        """
        rig = decoding()
        rig.core.suspend(KvMode.PERSIST, rig.now)
        sent = rig.core.take_command()
        replica = rig.core._replica
        assert rig.core.take_command() is None
        replica.start_over(replica.limits)
        assert sent == rig.core.take_command()
