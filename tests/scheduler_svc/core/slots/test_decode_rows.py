"""Successive decode steps: columns kept or written late change nothing that can be seen."""

from __future__ import annotations

import random
from operator import attrgetter

import numpy as np
import pytest

from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.core.slots.slot_blocks import MAX_LATE as MAX_LATE_BLOCKS
from scheduler_svc.core.slots.slot_tokens import MAX_LATE as MAX_LATE_TOKENS
from scheduler_svc.core.slots.slot_tokens import TAIL_LEN
from scheduler_svc.core.slots.slots import SlotTable
from tandem.link.batch import Batch
from tandem_bench.scheduler.service import BLOCK_SIZE, BenchService

COLUMNS = (
    "planned",
    "tokens.applied",
    "tokens.known",
    "tokens.last_token_s",
    "blocks.num_blocks",
    "blocks.table",
    "generation",
    "running",
    "decoding",
)
LONGEST = 800


def service(window: int = 1, num_blocks: int = 1024, num_slots: int = 12) -> BenchService:
    return BenchService(
        num_slots=num_slots,
        max_model_len=LONGEST,
        num_blocks=num_blocks,
        max_num_seqs=64,
        max_total_tokens=256,
        window=window,
    )


def columns(slots: SlotTable) -> dict[str, list]:
    return {name: attrgetter(name)(slots).tolist() for name in COLUMNS}


def outputs(core: BenchService) -> dict[int, list[int]]:
    replica = core.core._replica
    return {handle: core.core.outputs(handle) for handle in replica.cell.requests._by_handle}


def walk(bench: BenchService, seed: int, num_turns: int, *, looks: bool) -> list[tuple]:
    """Make random arrivals and ends, rare enough for runs of equal steps; returns every batch."""
    choose, sent = random.Random(seed), []
    core = bench.core
    for turn in range(num_turns):
        if turn % 100 == 0 or choose.random() < 0.02:
            bench.submit(bench.request(choose.randrange(1, 40), choose.randrange(2, 400)))
        if choose.random() < 0.01 and core.num_requests:
            tenant, request_id = choose.choice(list(core._cell.requests._by_id))
            core.end_request(request_id, FinishReason.CANCELLED, 1e-3, tenant=tenant)
        batch, _ = bench.turn()
        sent.append(() if batch is None else _summary(batch, core.state_hash))
        if looks:
            core.check_integrity()
            columns(core._replica.slots)
            outputs(bench)
    return sent


def _summary(batch: Batch, state_hash: int) -> tuple:
    rows = (batch.row_slot, batch.row_start, batch.row_num_tokens, batch.row_flags)
    appends = (batch.append_slot, batch.append_block, batch.release_slot)
    admits = [(one.slot, one.generation, one.token_ids.tolist()) for one in batch.admits]
    return state_hash, admits, *(column.tolist() for column in (*rows, *appends))


class TestTimes:
    def test_rows_tell_the_seconds_between_their_tokens(self):
        """
        Rows know no time before their first token together, and then that of the latest.
        """
        bench = service()
        bench.submit(bench.request(5, 40))
        for _ in range(3):
            bench.turn()
        slots = bench.core._replica.slots
        rows = slots.rows_of(slots.decoding.nonzero()[0])
        assert [None, 0.5, 2.0] == [rows.note_seen(now) for now in (1.0, 1.5, 3.5)]


class TestLateColumns:
    @pytest.mark.parametrize("window", [1, 2, 4])
    @pytest.mark.parametrize("num_blocks", [1024, 60])
    def test_looking_changes_nothing(self, window, num_blocks):
        """
        Batches, state hashes, outputs and columns are the same whether the columns are read at each
        step or at none, with blocks to spare and without.
        """
        watched, alone = (service(window, num_blocks) for _ in range(2))
        sent = walk(watched, seed=3, num_turns=300, looks=True)

        assert sent == walk(alone, seed=3, num_turns=300, looks=False)
        assert columns(watched.core._replica.slots) == columns(alone.core._replica.slots)
        assert outputs(watched) == outputs(alone)
        alone.core.check_integrity()

    @pytest.mark.parametrize(
        "num_turns",
        [1, 2, MAX_LATE_TOKENS, MAX_LATE_TOKENS + 1, MAX_LATE_BLOCKS + 3, TAIL_LEN + 40],
    )
    def test_columns_are_complete_after_any_run(self, num_turns):
        """
        The columns and outputs hold every step after any number of equal steps.
        """
        bench = service()
        for prompt_len in (1, 15, 16, 17):
            bench.submit(bench.request(prompt_len, LONGEST - 20))
        for _ in range(3):
            bench.turn()
        slots = bench.core._replica.slots
        before = {handle: len(tokens) for handle, tokens in outputs(bench).items()}
        planned = slots.planned.copy()
        for _ in range(num_turns):
            bench.turn()

        assert {handle: n + num_turns for handle, n in before.items()} == {
            handle: len(tokens) for handle, tokens in outputs(bench).items()
        }
        running = slots.running.nonzero()[0]
        assert (planned[running] + num_turns == slots.planned[running]).all()
        assert (-(-slots.planned[running] // BLOCK_SIZE) == slots.blocks.num_blocks[running]).all()
        bench.core.check_integrity()

    def test_equal_steps_are_written_when_looked_at_or_many(self):
        """
        Results and blocks of equal steps stay unwritten until they are read or there are many.
        """
        bench = service()
        for prompt_len in range(BLOCK_SIZE):
            bench.submit(bench.request(16 + prompt_len, LONGEST - 50))
        for _ in range(3):
            bench.turn()
        slots = bench.core._replica.slots
        late_tokens, late_blocks = [], []
        assert slots.tokens.known.any()
        assert slots.blocks.num_blocks.any()
        for _ in range(2 * MAX_LATE_BLOCKS + 1):
            bench.turn()
            late_tokens.append(len(slots.tokens._late))
            late_blocks.append(len(slots.blocks._late))
        expected = [number % MAX_LATE_TOKENS for number in range(1, len(late_tokens) + 1)]
        assert expected == late_tokens
        assert MAX_LATE_BLOCKS - 1 == max(late_blocks)
        assert 0 in late_blocks[1:]
        before = slots.tokens._known.copy()
        assert slots.tokens.known is slots.tokens._known
        assert (slots.tokens.known != before).any()
        assert not slots.tokens._late

    def test_full_tails_move_to_their_requests(self):
        """
        A tail never holds more than its length, and what does not fit is with the request.
        """
        bench = service()
        bench.submit(bench.request(4, LONGEST - 10))
        for _ in range(TAIL_LEN + 2 * MAX_LATE_TOKENS):
            bench.turn()
        replica = bench.core._replica
        request = replica.slots.request_of(0)
        assert 0 < replica.slots.tokens.tail_len(0) <= TAIL_LEN
        assert TAIL_LEN - MAX_LATE_TOKENS < len(request.outputs) <= TAIL_LEN
        assert int(replica.slots.tokens.known[0]) == 4 + len(
            request.outputs
        ) + replica.slots.tokens.tail_len(0)


class TestSharedColumns:
    def test_steps_of_the_same_rows_share_their_columns(self):
        """
        The slots and handles of a step have the version of the last one's while no request starts,
        ends or is added; then they are others, under a higher version.
        """
        bench = service()
        for _ in range(3):
            bench.submit(bench.request(8, 100))
        bench.turn()
        first, second = bench.turn()[0], bench.turn()[0]
        assert 0 < first.rows_version == second.rows_version
        assert first.row_slot.tolist() == second.row_slot.tolist()
        assert not first.row_slot.flags.writeable
        assert (first.row_start + 1 == second.row_start).all()

        bench.submit(bench.request(8, 100))
        bench.turn()
        third = bench.turn()[0]
        assert [0, 1, 2, 3] == third.row_slot.tolist()
        assert second.rows_version < third.rows_version
        assert np.array_equal([0, 1, 2], second.row_slot)

    def test_positions_are_taken_once_a_step(self):
        """
        The slot table takes the positions of a step once, and there is nothing to take until the next step.
        """
        bench = service()
        bench.submit(bench.request(8, 100))
        for _ in range(3):
            bench.turn()
        rows = bench.core._replica.slots.decode_rows()
        rows.take_start()
        assert rows.take_start() is None
        bench.turn()
        assert rows.start.tolist() == rows.take_start().tolist()
        assert rows.take_start() is None
