"""The integrity check, on which the properties rest, notices whatever is put wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.request.request import RequestState
from scheduler_svc.core.state.suspects import Mark
from tandem.errors import InternalError
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


def lose_a_block(state):
    state.slots.num_blocks[0] -= 1


def hold_a_block_twice(state):
    state.slots.block_table[0, 0] = state.slots.block_table[1, 0]


def hold_a_free_block(state):
    state.slots.block_table[0, 0] = np.flatnonzero(state.pool._free.is_free)[0]


def free_a_held_block(state):
    state.pool.give_back(state.slots.block_table[0, :1])


def forget_a_slot_to_release(state):
    state.slots.vacate(0)
    state.slots.ended.clear()


def run_without_a_request(state):
    state.slots.requests[0] = None


def miscount_running(state):
    state.slots.num_running += 1


def decode_without_running(state):
    free = (~state.slots.live).nonzero()[0][0]
    state.slots.decoding[free] = True


def lose_a_free_slot(state):
    state.slots._free.pop()


def compute_past_the_blocks(state):
    state.slots.planned[0] += 40


def apply_more_than_planned(state):
    state.slots.applied[0] = state.slots.planned[0] + 1


def forget_its_slot(state):
    state.slots.request_of(0).slot = 1


def mistake_the_generation(state):
    state.slots.generation[0] += 1


def mistake_the_state(state):
    state.slots.request_of(0).state = RequestState.PREFILL


def lose_an_output(state):
    state.slots.flush_tail(0)
    state.slots.request_of(0).outputs.pop()


def run_past_the_end(state):
    state.slots.stop_len[0] = state.slots.known[0]


def wait_and_run(state):
    request = state.slots.request_of(0)
    request.state = RequestState.WAITING
    state.queue.put_back(request, 0.0)


def be_nowhere(state):
    state.draining.clear()


def drain_under_another_key(state):
    key, request = state.draining.popitem()
    state.draining[key[0], key[1] + 1] = request


def drain_for_nothing(state):
    request = next(iter(state.draining.values()))
    request.applied = request.planned


def wait_for_what_is_not_in_flight(state):
    next(iter(state.draining.values())).planned += 1


def forget_a_batch(state):
    state.in_flight.pop()


def lose_a_request(state):
    state.counters.accepted += 1


def forget_a_handle(state):
    del state.by_handle[3]


def forget_a_sibling(state):
    state.by_id["r0"] = list(state.by_id["r0"])


def miscount_a_tenant(state):
    state.tenants.add("blue")


def pause_what_decodes(state):
    state.paused[0] = None


def decode_while_paused(state):
    state.pause(0)
    state.slots.set_decoding(0, True)


def leave_with_an_unknown_owner(state):
    state.leaving[0] = state.slots.request_of(0)


def swap_what_is_not_released(state):
    state.swapping[0] = 0


def keep_a_host_copy_of_who_runs(state):
    state.host.try_reserve(state.slots.request_of(0).number, 4, 4)


def give_way_without_running(state):
    waiting = state.by_handle[3]
    state.may_give_way.push(0, -waiting.number, waiting)


def hash_wrongly(state):
    state.slots._hash.add(1)


def forget_an_event(state):
    state.recorder._live[0].num_tokens -= 1


def suspect_who_left(state):
    stranger = replace(state.by_handle[3], number=99)
    state.suspects._marks[99] = Mark(request=stranger)


def miscount_suspects(state):
    state.suspects.num_suspects += 1


def try_who_is_not_marked(state):
    state.suspects.trial[3] = Mark(request=state.by_handle[3])


def go_on_with_a_trial_for_nobody(state):
    mark = Mark(request=state.by_handle[3])
    state.suspects._marks[3] = state.suspects.trial[3] = mark


CORRUPTIONS = [
    lose_a_block, hold_a_block_twice, hold_a_free_block, free_a_held_block,
    forget_a_slot_to_release, run_without_a_request, miscount_running, decode_without_running,
    lose_a_free_slot, compute_past_the_blocks, apply_more_than_planned, forget_its_slot,
    mistake_the_generation, mistake_the_state, lose_an_output, run_past_the_end, wait_and_run,
    be_nowhere, drain_under_another_key, drain_for_nothing, wait_for_what_is_not_in_flight,
    forget_a_batch, lose_a_request, forget_a_handle, forget_a_sibling, miscount_a_tenant,
    pause_what_decodes, decode_while_paused, leave_with_an_unknown_owner, swap_what_is_not_released,
    keep_a_host_copy_of_who_runs, give_way_without_running, hash_wrongly, forget_an_event,
    suspect_who_left, miscount_suspects, try_who_is_not_marked, go_on_with_a_trial_for_nobody,
]  # fmt: skip


class TestIntegrity:
    @pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corrupt: corrupt.__name__)
    def test_a_corrupted_state_is_noticed(self, corrupt):
        """
        The check fails after one wrong change of any part of the state.
        """
        geometry = geometry_of(small_config(max_batch_size=3), num_host_blocks=8)
        rig = busy()
        state = rig.core._state
        state.host = type(state.host)(geometry.num_host_blocks)
        corrupt(state)
        with pytest.raises(InternalError):
            rig.core.check_integrity()
