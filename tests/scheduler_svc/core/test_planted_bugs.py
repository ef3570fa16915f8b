"""Bugs planted in the core are found by the properties: the other tests of this folder bite."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.core import admitting, applier, planner, prefills, request, slots, state
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.queue import WaitingQueue
from tests.scheduler_svc.core.random_walk import walk_all


def leak_a_block(monkeypatch):
    """Every release forgets one block."""
    give_back = BlockPool.give_back
    monkeypatch.setattr(BlockPool, "give_back", lambda pool, blocks: give_back(pool, blocks[1:]))


def hand_out_a_block_twice(monkeypatch):
    """A taken block stays at the top of the free list."""
    take = BlockPool.try_take

    def take_and_keep(pool, count):
        taken = take(pool, count)
        if taken is not None and count:
            pool.num_free += 1
        return taken

    monkeypatch.setattr(BlockPool, "try_take", take_and_keep)


def readmit_while_draining(monkeypatch):
    """A preempted request waits again at once, though results are under way."""

    def preempt(core_state, slot):
        request = core_state.slots.request_of(slot)
        core_state.slots.vacate(slot)
        request.num_preemptions += 1
        core_state.counters.preemptions += 1
        core_state.wait_again(request)

    monkeypatch.setattr(state.CoreState, "preempt", preempt)


def drop_late_tokens(monkeypatch):
    """Tokens under way at a preemption are thrown away."""
    monkeypatch.setattr(applier, "_append_late_token", lambda *_: None)


def keep_running_past_the_end(monkeypatch):
    """Nobody ends by a token."""
    monkeypatch.setattr(
        slots.EndIds,
        "may_end",
        lambda _, tokens: np.zeros(len(tokens), np.bool_),
    )


def reuse_generations(monkeypatch):
    """A slot's generation does not grow."""
    occupy = slots.SlotTable.occupy

    def occupy_again(table, request, blocks, max_blocks):
        table.generation[table._free[-1]] = 0
        return occupy(table, request, blocks, max_blocks)

    monkeypatch.setattr(slots.SlotTable, "occupy", occupy_again)


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

    def last_first(queue, now, view):
        return reversed(list(queue.in_order(now, view)))

    monkeypatch.setattr(WaitingQueue, "candidates", last_first)


def forget_the_budget(monkeypatch):
    """Prompts are computed whole, whatever the budget."""

    def add_chunk(draft, slot):
        table = draft.state.slots
        left = int(table.admitted[slot] - table.planned[slot])
        draft.prefills.append((slot, left, 1))
        table.set_decoding(slot, True)
        table.request_of(slot).move(request.RequestState.DECODE)

    monkeypatch.setattr(prefills, "add_chunk", add_chunk)
    monkeypatch.setattr(admitting, "add_chunk", add_chunk)


PLANTED = [
    leak_a_block,
    hand_out_a_block_twice,
    readmit_while_draining,
    drop_late_tokens,
    keep_running_past_the_end,
    reuse_generations,
    forget_outputs,
    grow_one_token_late,
    prefer_the_newest,
    forget_the_budget,
]


class TestPlantedBugs:
    @pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
    def test_the_properties_find_it(self, plant, monkeypatch):
        """
        A core with this bug breaks a promise.
        """
        plant(monkeypatch)
        with pytest.raises(Exception) as caught:
            walk_all(range(150), num_events=40)
        assert not isinstance(caught.value, (AttributeError, NameError, TypeError))
