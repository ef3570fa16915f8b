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
    replica.slots.ended.clear()


def run_without_a_request(replica):
    replica.slots._requests[0] = None


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
    replica.in_flight.pop()


def lose_a_request(replica):
    replica.cell.counters.requests.accepted_requests += 1


def forget_a_handle(replica):
    del replica.cell.requests._by_handle[3]


def forget_a_sibling(replica):
    replica.cell.requests._by_id["r0"] = list(replica.cell.requests._by_id["r0"])


def miscount_a_tenant(replica):
    replica.cell.requests.tenants.add("blue")


def pause_what_decodes(replica):
    replica.paused[0] = None


def decode_while_paused(replica):
    replica.pause(0)
    replica.slots.set_decoding(0, True)


def leave_with_an_unknown_owner(replica):
    replica.slots.ended[0] = replica.slots.request_of(0)


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
    replica.cell.recorder._live[0].num_tokens -= 1


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


class TestIntegrity:
    @pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corrupt: corrupt.__name__)
    def test_a_corrupted_state_is_noticed(self, corrupt):
        """
        The check fails after one wrong change of any part of the state.
        """
        geometry = geometry_of(small_config(max_batch_size=3), num_host_blocks=8)
        rig = busy()
        replica = rig.core._replica
        replica.kv.host = type(replica.kv.host)(geometry.num_host_blocks)
        corrupt(replica)
        with pytest.raises(InternalError):
            rig.core.check_integrity()
