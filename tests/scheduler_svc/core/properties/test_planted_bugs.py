"""Bugs planted in the core: the random walks find each of them."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core import admission, executor_port
from scheduler_svc.core.batch import batch_builder, planner, prefill_admission, prefills, swapping
from scheduler_svc.core.faults import precautions
from scheduler_svc.core.kv_cache import host_blocks, prefix_cache
from scheduler_svc.core.kv_cache.block_pool import BlockPool
from scheduler_svc.core.output import output_processor, row_errors
from scheduler_svc.core.queue.queue import WaitingQueue
from scheduler_svc.core.request import request
from scheduler_svc.core.request.options import PreemptionMode, VictimRule
from scheduler_svc.core.slots import end_ids, slots
from scheduler_svc.core.state import ends, replica, suspects
from tandem.errors import InvalidLogits
from tests.scheduler_svc.core.properties.random_walk import walk_all


def leak_a_block(monkeypatch):
    """Every release forgets one block."""
    give_back = BlockPool.give_back
    monkeypatch.setattr(BlockPool, "give_back", lambda pool, blocks: give_back(pool, blocks[1:]))


def hand_out_a_block_twice(monkeypatch):
    """A taken block stays free."""
    take = BlockPool.try_take

    def take_and_keep(pool, count, after):
        taken = take(pool, count, after)
        if taken is not None and count:
            pool._free.add(taken[:1])
        return taken

    monkeypatch.setattr(BlockPool, "try_take", take_and_keep)


def readmit_while_draining(monkeypatch):
    """A preempted request waits again at once, though results are under way."""
    preempt = replica.Replica.preempt

    def preempt_at_once(executor, slot, *detail):
        victim = executor.slots.request_of(slot)
        mode = preempt(executor, slot, *detail)
        if victim.state is request.RequestState.DRAINING:
            executor.wait_again(victim)
        return mode

    monkeypatch.setattr(replica.Replica, "preempt", preempt_at_once)


def drop_late_tokens(monkeypatch):
    """Tokens under way at a preemption are thrown away."""
    monkeypatch.setattr(output_processor, "_append_late_token", lambda *_: None)


def keep_running_past_the_end(monkeypatch):
    """No request ends by a token."""
    monkeypatch.setattr(
        end_ids.EndIds,
        "may_end",
        lambda _, tokens: np.zeros(len(tokens), np.bool_),
    )


def reuse_generations(monkeypatch):
    """A slot's generation does not grow."""
    occupy = slots.SlotTable.occupy

    def occupy_again(table, *what):
        table.generation[table._free[-1]] = 0
        return occupy(table, *what)

    monkeypatch.setattr(slots.SlotTable, "occupy", occupy_again)


def count_versions_anew(monkeypatch):
    """After an executor's death other rows have a version that earlier ones had."""
    monkeypatch.setattr(slots.SlotTable, "next_version", lambda _: 1)


def forget_outputs(monkeypatch):
    """A readmitted request carries only its prompt."""
    monkeypatch.setattr(
        request.Request, "known_tokens", lambda known: known.new.prompt, raising=True
    )


def grow_one_token_late(monkeypatch):
    """The block for a new position is taken one token too late."""

    def grow(_draft, ready):
        return ready

    monkeypatch.setattr(planner, "grow", grow)


def prefer_the_newest(monkeypatch):
    """The queue is served from its end."""

    def last_first(queue, now, view, _can_take=None):
        return reversed(list(queue.in_order(now, view)))

    monkeypatch.setattr(WaitingQueue, "candidates", last_first)


def forget_the_budget(monkeypatch):
    """Prompts are computed whole, whatever the budget."""

    def add_chunk(batch_builder, slot):
        table = batch_builder.replica.slots
        left = int(table.admitted.known_len[slot] - table.planned[slot])
        batch_builder.prefills.append((slot, left, 1))
        table.set_decoding(slot, True)
        table.request_of(slot).move(request.RequestState.DECODE)

    monkeypatch.setattr(prefills, "add_chunk", add_chunk)
    monkeypatch.setattr(prefill_admission, "add_chunk", add_chunk)


def share_across_salts(monkeypatch):
    """Prompts are hashed without their salt."""
    digests = prefix_cache.block_digests
    monkeypatch.setattr(
        prefix_cache,
        "block_digests",
        lambda tokens, size, _salt=b"", parent=None: digests(tokens, size, b"", parent),
    )


def share_the_block_to_write(monkeypatch):
    """The block in which a request goes on to write is shared instead of copied."""

    def of(cls, table, num_valid, num_known, block_size):
        num_tokens = min(num_valid, num_known - 1)
        num_shared = -(-num_tokens // block_size)
        return cls(num_tokens=num_tokens, num_shared=num_shared, blocks=table[:num_shared])

    monkeypatch.setattr(prefix_cache.Prefix, "of", classmethod(of))


def forget_to_copy(monkeypatch):
    """Blocks that are to begin as copies are taken without one."""

    def copy(drafted, source, _destination):
        drafted.replica.kv.pool.give_back(np.array([source], np.int32))

    monkeypatch.setattr(batch_builder.BatchBuilder, "copy", copy)


def find_what_is_not_sent(monkeypatch):
    """A prompt's blocks can be matched as soon as it is admitted."""
    note_admitted = prefix_cache.PrefixCache.note_admitted

    def note_and_index(cache, slot, *what):
        note_admitted(cache, slot, *what)
        planned = cache._slots.planned[slot]
        cache._slots.planned[slot] = cache._slots.admitted.prompt_len[slot]
        cache.index_sent(slot)
        cache._slots.planned[slot] = planned

    monkeypatch.setattr(prefix_cache.PrefixCache, "note_admitted", note_and_index)


def fail_who_read_bad_rows(monkeypatch):
    """A request that shares KV with a bad row fails with it, without a new start or a retry."""

    def fail(executor, victim):
        ends.fail(executor, victim, InvalidLogits("NaN"))

    monkeypatch.setattr(row_errors, "distrust", lambda *_: None)
    monkeypatch.setattr(row_errors, "retry_alone", fail)


def forget_host_copies(monkeypatch):
    """The host blocks of a request that ends are not free again."""
    monkeypatch.setattr(host_blocks.HostBlocks, "discard", lambda *_: None)


def swap_in_the_wrong_order(monkeypatch):
    """Host blocks are given back last first."""
    copy_in = swapping.Swaps.copy_in

    def copy_in_reverse(swaps, *what):
        before = len(swaps._in_host)
        cached = copy_in(swaps, *what)
        swaps._in_host[before:] = swaps._in_host[before:][::-1]
        return cached

    monkeypatch.setattr(swapping.Swaps, "copy_in", copy_in_reverse)


def never_resume(monkeypatch):
    """Paused rows stay paused though there are blocks."""
    monkeypatch.setattr(planner, "resume", lambda _: [])


def forget_who_is_aged(monkeypatch):
    """A request that has waited long is passed like any other."""
    monkeypatch.setattr(WaitingQueue, "_aged", lambda *_: iter(()))
    monkeypatch.setattr(WaitingQueue, "_aged_before_s", lambda *_: float("-inf"))


def forget_prior_outputs(monkeypatch):
    """Outputs that a request came with are produced and told anew."""
    choices_of = admission.choices_of

    def without_prior(new, **what):
        return choices_of(replace(new, prior_outputs=()), **what)

    monkeypatch.setattr(admission, "choices_of", without_prior)


def try_suspects_beside_others(monkeypatch):
    """All other requests go on running while suspects are tried."""
    monkeypatch.setattr(precautions, "hold_trial", lambda _: None)


def try_several_steps_at_a_time(monkeypatch):
    """Trials run ahead like everything else."""
    planner_plan = planner.plan

    def plan(executor, now):
        steps = executor.steps
        waiting, steps.in_flight = steps.in_flight, deque()
        try:
            batch = planner_plan(executor, now)
        finally:
            waiting.extend(steps.in_flight)
            steps.in_flight = waiting
        return batch

    monkeypatch.setattr(executor_port, "plan", plan)


def blame_one_of_many(monkeypatch):
    """The first row of a step that died is taken to have been alone in it."""
    note_death = suspects.Suspects.note_death

    def blame_the_first(suspected, rows, num_live, *, num_ended):
        return note_death(suspected, rows[:1], num_live)

    monkeypatch.setattr(suspects.Suspects, "note_death", blame_the_first)


def never_forgive(monkeypatch):
    """Progress clears no request."""
    monkeypatch.setattr(output_processor, "note_progress", lambda *_: None)


PLANTED = [
    leak_a_block,
    hand_out_a_block_twice,
    readmit_while_draining,
    drop_late_tokens,
    keep_running_past_the_end,
    reuse_generations,
    count_versions_anew,
    forget_outputs,
    grow_one_token_late,
    prefer_the_newest,
    forget_the_budget,
    share_across_salts,
    share_the_block_to_write,
    forget_to_copy,
    find_what_is_not_sent,
    fail_who_read_bad_rows,
    forget_host_copies,
    swap_in_the_wrong_order,
    never_resume,
    forget_who_is_aged,
    forget_prior_outputs,
    try_suspects_beside_others,
    try_several_steps_at_a_time,
    blame_one_of_many,
    never_forgive,
]
WHERE = {
    fail_who_read_bad_rows: {"prefix_caching": True},
    share_across_salts: {"prefix_caching": True},
    swap_in_the_wrong_order: {"preemption_mode": PreemptionMode.SWAP},
    forget_host_copies: {"preemption_mode": PreemptionMode.SWAP},
    never_resume: {"victim_rule": VictimRule.PAUSED_BUDGET, "paused_budget_blocks": 6},
    forget_who_is_aged: {"ageing_s": 1.0},
}
"""Options without which a bug could not show."""
FOUND_LATE = {
    share_across_salts,
    share_the_block_to_write,
    forget_to_copy,
    forget_host_copies,
    swap_in_the_wrong_order,
    never_resume,
    blame_one_of_many,
    never_forgive,
}
"""Bugs that walks run into only after a second and more."""


class TestPlantedBugs:
    @pytest.mark.parametrize(
        "plant",
        [
            pytest.param(plant, marks=[pytest.mark.slow] * (plant in FOUND_LATE))
            for plant in PLANTED
        ],
        ids=lambda plant: plant.__name__,
    )
    def test_the_properties_find_it(self, plant, monkeypatch):
        """
        A core with this bug breaks a promise.
        """
        plant(monkeypatch)
        with pytest.raises(Exception) as caught:
            walk_all(range(150), num_events=40, **WHERE.get(plant, {}))
        assert not isinstance(caught.value, (AttributeError, NameError, TypeError))
