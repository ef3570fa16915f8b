"""The integrity check, on which the properties rest, notices whatever is put wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.request.request import RequestState
from scheduler_svc.core.state.suspects import Mark
from tandem.errors import InternalError
from tandem.link.commands import KvMode
from tests.scheduler_svc.core.harness import Rig, geometry_of, small_config

OPTIONS = CoreOptions(
    schedule_conservativeness=0.0, track_request_events=True, track_token_events=True
)


def busy() -> Rig:
    """Return a rig in which slots 0 and 1 decode, one request drains and one waits."""
    rig = Rig(small_config(max_batch_size=3), delay=3, options=OPTIONS, checked=False)
    for _ in range(4):
        rig.submit(prompt_len=9, max_tokens=20)
    for _ in range(6):
        rig.step()
    rig.core.preempt("r2")
    rig.plan()
    states = [rig.core.state_of(handle) for handle in range(4)]
    assert [RequestState.DECODE] * 2 + [RequestState.DRAINING, RequestState.WAITING] == states
    rig.core.check_integrity()
    return rig


def lose_a_block(replica):
    replica.slots.blocks.num_blocks[0] -= 1


def hold_a_block_twice(replica):
    replica.slots.blocks.table[0, 0] = replica.slots.blocks.table[1, 0]


def hold_a_free_block(replica):
    replica.slots.blocks.table[0, 0] = np.flatnonzero(replica.kv.pool._free.is_free)[0]


def free_a_held_block(replica):
    replica.kv.pool.give_back(replica.slots.blocks.table[0, :1])


def forget_a_slot_to_release(replica):
    replica.slots.vacate(0)
    replica.slots._vacated.clear()


def run_without_a_request(replica):
    replica.slots._requests[0] = None


def end_at_an_id_of_no_request(replica):
    replica.slots.admitted.end_ids.add([5])


def look_up_another_id(replica):
    replica.slots.admitted.end_ids._is_end = np.ones(1, np.bool_)


def report_to_another_handle(replica):
    replica.slots.admitted.handle[0] += 1


def queue_of_one_tenant(replica):
    (turn,) = replica.cell.queue._fresh._turns.values()
    return turn.queue


def lose_an_entry_of_a_heap(replica):
    queue_of_one_tenant(replica)._levels._heap.clear()


def wait_in_another_bucket(replica):
    ((_, bucket),) = queue_of_one_tenant(replica)._levels
    bucket._waiting[99] = bucket._waiting.popitem()[1]


def miscount_a_period(replica):
    (periods,) = replica.cell.queue._periods._counts.values()
    periods[next(iter(periods))] += 1


def rank_a_tenant_wrongly(replica):
    (turn,) = replica.cell.queue._fresh._turns.values()
    turn.rank = (turn.rank[0] + 1, *turn.rank[1:])


def forget_a_charge(replica):
    replica.cell.queue._fresh._counters._charges.popitem()


def expect_an_end_of_a_stranger(replica):
    replica.cell.requests._deadlines.push(1.0, 0, replica.slots.request_of(0))


def be_known_by_another_handle(replica):
    by_handle = replica.cell.requests._by_handle
    by_handle[77] = by_handle.pop(3)


def lose_prior_outputs(replica):
    replica.slots.request_of(0).terms.num_prior = 99


def be_no_choice_of_its_own(replica):
    replica.slots.request_of(0).siblings = []


def have_fewer_setbacks_than_none(replica):
    replica.slots.request_of(0).setbacks.num_preemptions = -1


def find_more_cached_than_there_is(replica):
    replica.slots.request_of(0).prefix.num_cached_tokens = 10


def begin_after_the_latest_token(replica):
    times = replica.slots.request_of(0).times
    times.first_token_s, times.last_token_s = 3.0, 2.0


def lose_an_entry_of_those_that_may_give_way(replica):
    replica.let_give_way(replica.slots.request_of(0))
    replica.may_give_way._heap.clear()


def free_a_slot_twice(replica):
    replica.slots._free.append(0)


def share_a_turn(replica):
    replica.slots.admitted.turn[0] = replica.slots.admitted.turn[1]


def allow_no_block(replica):
    replica.slots.admitted.max_blocks[0] = 0


def lose_an_offset(replica):
    empty = np.empty(0, np.int32)
    replica.cell.events.add_tokens(np.array([0], np.int64), empty, np.array([5], np.int32))


def begin_a_tail_behind_its_tokens(replica):
    replica.slots.tokens.tail_start[0] += 100


def outgrow_a_tail(replica):
    replica.slots.tokens.tail_start[0] -= 600


def write_into_another_tail(replica):
    replica.slots.tokens._base[0] += 5


def give_a_free_slot_a_block(replica):
    replica.slots.blocks.num_blocks[(~replica.slots.live).nonzero()[0][0]] = 1


def keep_rows_with_other_keys(replica):
    replica.slots.decode_rows().key_sum += 1


def keep_rows_too_long(replica):
    replica.slots.decode_rows().num_left += 1


def keep_rows_that_started_earlier(replica):
    rows = replica.slots.decode_rows()
    rows.start = rows.start - 1


def miscount_running(replica):
    replica.slots.num_running += 1


def miscount_decoding(replica):
    replica.slots.num_decoding += 1


def decode_without_running(replica):
    free = (~replica.slots.live).nonzero()[0][0]
    replica.slots.decoding[free] = True


def lose_a_free_slot(replica):
    replica.slots._free.pop()


def compute_past_the_blocks(replica):
    replica.slots.planned[0] += 40


def apply_more_than_planned(replica):
    replica.slots.tokens.applied[0] = replica.slots.planned[0] + 1


def forget_its_slot(replica):
    replica.slots.request_of(0).place.slot = 1


def mistake_the_generation(replica):
    replica.slots.generation[0] += 1


def mistake_the_state(replica):
    replica.slots.request_of(0).state = RequestState.PREFILL


def lose_an_output(replica):
    replica.slots.tokens.flush(0)
    replica.slots.request_of(0).outputs.pop()


def run_past_the_end(replica):
    replica.slots.admitted.stop_len[0] = replica.slots.tokens.known[0]


def wait_and_run(replica):
    request = replica.slots.request_of(0)
    request.state = RequestState.WAITING
    replica.cell.queue.put_back(request, 0.0)


def be_nowhere(replica):
    replica.draining.clear()


def drain_under_another_key(replica):
    key, request = replica.draining.popitem()
    replica.draining[key[0], key[1] + 1] = request


def drain_for_nothing(replica):
    request = next(iter(replica.draining.values()))
    request.place.applied = request.place.planned


def wait_for_what_is_not_in_flight(replica):
    next(iter(replica.draining.values())).place.planned += 1


def forget_a_batch(replica):
    replica.steps.in_flight.pop()


def lose_a_request(replica):
    replica.cell.telemetry.counters.requests.accepted_requests += 1


def forget_a_handle(replica):
    del replica.cell.requests._by_handle[3]


def forget_a_sibling(replica):
    replica.cell.requests._by_id["", "r0"] = list(replica.cell.requests._by_id["", "r0"])


def miscount_a_tenant(replica):
    replica.cell.requests.tenants.add("blue")


def pause_what_decodes(replica):
    replica.paused[0] = None


def decode_while_paused(replica):
    replica.pause(0)
    replica.slots.set_decoding(0, True)


def leave_with_an_unknown_owner(replica):
    replica.slots._vacated[0] = replica.slots.request_of(0)


def swap_what_is_not_released(replica):
    replica.kv._swapping[0] = 0


def keep_a_host_copy_of_who_runs(replica):
    replica.kv.host.try_reserve(replica.slots.request_of(0).number, 4, 4)


def give_way_without_running(replica):
    waiting = replica.cell.requests._by_handle[3]
    replica.may_give_way.push(0, -waiting.number, waiting)


def hash_wrongly(replica):
    replica.slots._hash.add(1)


def forget_an_event(replica):
    replica.cell.telemetry.recorder._live[0].num_tokens -= 1


def suspect_who_left(replica):
    stranger = replace(replica.cell.requests._by_handle[3], number=99)
    replica.cell.suspects._marks[99] = Mark(request=stranger)


def miscount_suspects(replica):
    replica.cell.suspects.num_suspects += 1


def try_who_is_not_marked(replica):
    replica.cell.suspects.trial[3] = Mark(request=replica.cell.requests._by_handle[3])


def go_on_with_a_trial_for_nobody(replica):
    mark = Mark(request=replica.cell.requests._by_handle[3])
    replica.cell.suspects._marks[3] = replica.cell.suspects.trial[3] = mark


def run_more_than_allowed(replica):
    replica.limits = replace(replica.limits, max_running=1)


def drain_in_another_state(replica):
    next(iter(replica.draining.values())).state = RequestState.WAITING


def wait_in_another_state(replica):
    replica.cell.requests._by_handle[3].state = RequestState.PREFILL


def wait_with_a_slot(replica):
    replica.cell.requests._by_handle[3].place.slot = 2


def admit_none_though_none_runs(replica):
    for slot in (0, 1):
        replica.preempt(slot)
    replica.gate.is_full = True


def hold_kv_that_was_dropped(replica):
    replica.gate.suspension.begin(KvMode.RECOMPUTE)
    replica.gate.suspension.note_told()


def expect_more_than_all(replica):
    replica.ratio._start = 1.5


def fall_below_no_share(replica):
    replica.ratio.min = -0.1


def rise_instead_of_falling(replica):
    replica.ratio.min = replica.ratio.init + 0.01


def expect_from_a_later_step(replica):
    replica.ratio._since_step = replica.steps.num_decode + 2


def have_room_for_no_row(replica):
    replica.room.max_rows = 0


def have_room_for_fewer_tokens_than_rows(replica):
    replica.room.max_rows, replica.room.max_tokens = 4, 3


def limit_tokens_and_not_rows(replica):
    replica.room.max_tokens = 3


def stay_small_for_too_long(replica):
    replica.room.patience_steps = 7
    replica.room._grows_at = replica.steps.num_done + 8


CORRUPTIONS = [
    lose_a_block, hold_a_block_twice, hold_a_free_block, free_a_held_block,
    forget_a_slot_to_release, run_without_a_request, miscount_running, miscount_decoding,
    decode_without_running,
    lose_a_free_slot, compute_past_the_blocks, apply_more_than_planned, forget_its_slot,
    mistake_the_generation, mistake_the_state, lose_an_output, run_past_the_end, wait_and_run,
    be_nowhere, drain_under_another_key, drain_for_nothing, wait_for_what_is_not_in_flight,
    forget_a_batch, lose_a_request, forget_a_handle, forget_a_sibling, miscount_a_tenant,
    pause_what_decodes, decode_while_paused, leave_with_an_unknown_owner, swap_what_is_not_released,
    keep_a_host_copy_of_who_runs, give_way_without_running, hash_wrongly, forget_an_event,
    suspect_who_left, miscount_suspects, try_who_is_not_marked, go_on_with_a_trial_for_nobody,
]  # fmt: skip
NAMED = {
    run_more_than_allowed: "more slots run than max_batch_size",
    mistake_the_state: "r0 is prefill, expected decode",
    pause_what_decodes: "r0 is decode, expected paused",
    decode_while_paused: "slot 0 is paused and decodes",
    forget_a_batch: "planned tokens that are not in flight",
    drain_in_another_state: "a request drains in another state",
    drain_under_another_key: "a draining request is under another's key",
    drain_for_nothing: "a request drains with nothing in flight",
    wait_for_what_is_not_in_flight: "a draining request waits for what is not in flight",
    wait_in_another_state: "a request waits in another state",
    wait_with_a_slot: "a waiting request has a slot",
    lose_an_entry_of_a_heap: "an item of a heap would never surface",
    wait_in_another_bucket: "indexes of requests that never ran differ",
    miscount_a_period: "periods of requests that never ran differ",
    rank_a_tenant_wrongly: "the rank of a tenant is out of date",
    forget_a_charge: "charged requests are not those that ran",
    expect_an_end_of_a_stranger: "a request with a deadline is missing, or a stranger has one",
    be_known_by_another_handle: "ids and handles are not of the same requests",
    lose_prior_outputs: "lost outputs it came with",
    be_no_choice_of_its_own: "is none of its own choices",
    have_fewer_setbacks_than_none: "has fewer setbacks than none",
    find_more_cached_than_there_is: "found more tokens cached than it has",
    begin_after_the_latest_token: "had its first token after its latest",
    lose_an_entry_of_those_that_may_give_way: "an item of a heap would never surface",
    free_a_slot_twice: "the free slots are not those that are not live",
    share_a_turn: "two slots have one turn",
    allow_no_block: "allows no block",
    lose_an_offset: "columns of tokens differ in length",
    begin_a_tail_behind_its_tokens: "a slot's tail begins behind its tokens",
    outgrow_a_tail: "a slot's tail has no room for its tokens",
    write_into_another_tail: "a slot's tokens go into another's tail",
    give_a_free_slot_a_block: "a live slot has no block, or a free one has some",
    keep_rows_with_other_keys: "kept decode rows have the keys of other slots",
    keep_rows_too_long: "kept decode rows end at another step",
    keep_rows_that_started_earlier: "kept decode rows have another start",
    end_at_an_id_of_no_request: "end ids are not those of the running requests",
    look_up_another_id: "the table of end ids differs from their counts",
    report_to_another_handle: "has facts of another request",
    be_nowhere: "a request is in no place or in two",
    give_way_without_running: "a request that does not run may give way",
    admit_none_though_none_runs: "none runs and none may be admitted",
    hold_kv_that_was_dropped: "a slot is live whose KV a suspension dropped",
    expect_more_than_all: "the new-token ratio is no share",
    fall_below_no_share: "the new-token ratio falls to no share",
    rise_instead_of_falling: "the new-token ratio falls to no share",
    expect_from_a_later_step: "the new-token ratio is that of a later step",
    have_room_for_no_row: "steps have room for no row",
    have_room_for_fewer_tokens_than_rows: "steps have room for fewer tokens than rows",
    limit_tokens_and_not_rows: "steps have room for fewer tokens than rows",
    stay_small_for_too_long: "steps stay small for too long",
}
"""Corruptions that one check is there for, with what it says."""


def corrupted(corrupt) -> Rig:
    """Return a busy rig, with host blocks, after one wrong change."""
    geometry = geometry_of(small_config(max_batch_size=3), num_host_blocks=8)
    rig = busy()
    replica = rig.core._replica
    replica.kv.host = type(replica.kv.host)(geometry.num_host_blocks)
    corrupt(replica)
    return rig


class TestIntegrity:
    @pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corrupt: corrupt.__name__)
    def test_a_corrupted_state_is_noticed(self, corrupt):
        """
        The check fails after one wrong change of any part of the state.
        """
        rig = corrupted(corrupt)
        with pytest.raises(InternalError):
            rig.core.check_integrity()

    @pytest.mark.parametrize("corrupt", NAMED, ids=lambda corrupt: corrupt.__name__)
    def test_the_check_says_what_is_wrong(self, corrupt):
        """
        Each corruption is noticed by the check that is there for it, and told in its words.
        """
        rig = corrupted(corrupt)
        with pytest.raises(InternalError, match=NAMED[corrupt]):
            rig.core.check_integrity()

    @pytest.mark.parametrize(
        "change",
        [
            lambda replica: replica.room.note_failure(1, 1, replica.steps.num_done),
            lambda replica: replica.ratio.note_retraction(
                replica.slots, replica.steps.num_decode + 1
            ),
            lambda replica: replica.gate.suspension.begin(KvMode.RECOMPUTE),
            lambda replica: replica.gate.note_full(replica.slots.num_running),
        ],
        ids=["small-step", "retraction", "suspension-asked-for", "full"],
    )
    def test_what_may_happen_passes(self, change):
        """
        Steps of one row, a ratio from the step that is planned, a suspension that the executor does
        not know of yet, and a full executor are no faults.
        """
        corrupted(change).core.check_integrity()
