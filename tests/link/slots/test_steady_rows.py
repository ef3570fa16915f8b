"""Batches that repeat the one before: they get fewer checks and have the same effect."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest

from tandem.errors import SessionLost
from tandem.link import MAX_STAGES
from tandem.link.batch import Batch
from tandem.link.slots.slot_state import MAX_STEADY, SlotState
from tests.link.slots.whole_hash import hash_from_scratch
from tests.link.values import admission, flags, ints

NUM_SLOTS, WIDTH, BLOCK_SIZE, NUM_BLOCKS = 6, 20, 4, 100
SLOTS = (0, 1, 3, 4)
COLUMNS = ("live", "planned", "num_tokens_known", "num_blocks_held", "block_table", "num_holders")


class Planner:
    """Planner of decode steps for four slots of different lengths, in the order of slots."""

    def __init__(self) -> None:
        self.length = {slot: 3 + slot for slot in SLOTS}
        self.held = {slot: -(-length // BLOCK_SIZE) for slot, length in self.length.items()}
        self.next_block = 1

    def admit(self) -> Batch:
        admits = []
        for slot in SLOTS:
            blocks = list(range(self.next_block, self.next_block + self.held[slot]))
            self.next_block += self.held[slot]
            admits.append(admission(slot, 1, self.length[slot], blocks))
        lengths = list(self.length.values())
        return Batch(
            admits=tuple(admits),
            row_slot=ints(*SLOTS),
            row_num_tokens=ints(*lengths),
            row_start=ints(*[0] * len(SLOTS)),
            row_flags=flags(*[1] * len(SLOTS)),
        )

    def decode(self) -> Batch:
        full = [slot for slot in SLOTS if self.length[slot] == self.held[slot] * BLOCK_SIZE]
        blocks = list(range(self.next_block, self.next_block + len(full)))
        self.next_block += len(full)
        for slot in full:
            self.held[slot] += 1
        starts = list(self.length.values())
        for slot in SLOTS:
            self.length[slot] += 1
        return Batch(
            row_slot=ints(*SLOTS),
            row_num_tokens=ints(*[1] * len(SLOTS)),
            row_start=ints(*starts),
            row_flags=flags(*[1] * len(SLOTS)),
            append_slot=ints(*full),
            append_block=ints(*blocks),
        )


def state() -> SlotState:
    return SlotState(NUM_SLOTS, WIDTH, BLOCK_SIZE, NUM_BLOCKS)


def columns(slots: SlotState) -> dict[str, list]:
    return {name: getattr(slots, name).tolist() for name in COLUMNS}


def outcome(slots: SlotState, batch: Batch) -> tuple:
    """Return the error's message or "", and the state that a copy has after the batch."""
    slots = deepcopy(slots)
    try:
        slots.apply(batch)
    except SessionLost as error:
        return error.message, columns(slots), slots.state_hash
    return "", columns(slots), slots.state_hash


def fully_checked(slots: SlotState) -> SlotState:
    slots = deepcopy(slots)
    slots._steady.clear()
    return slots


def after(num_steps: int) -> tuple[SlotState, Planner]:
    slots, planner = state(), Planner()
    slots.apply(planner.admit())
    for _ in range(num_steps):
        slots.apply(planner.decode())
    return slots, planner


DAMAGE = {
    "another_slot": lambda b: replace(b, row_slot=ints(0, 1, 3, 5)),
    "other_order": lambda b: replace(b, row_slot=b.row_slot[::-1], row_start=b.row_start[::-1]),
    "a_row_less": lambda b: replace(
        b,
        row_slot=b.row_slot[1:],
        row_start=b.row_start[1:],
        row_num_tokens=b.row_num_tokens[1:],
        row_flags=b.row_flags[1:],
    ),
    "start_too_late": lambda b: replace(b, row_start=b.row_start + ints(0, 1, 0, 0)),
    "two_tokens": lambda b: replace(b, row_num_tokens=ints(1, 2, 1, 1)),
    "samples_not": lambda b: replace(b, row_flags=flags(1, 0, 1, 1)),
    "no_append": lambda b: replace(b, append_slot=ints(), append_block=ints()),
    "append_of_others": lambda b: replace(b, append_slot=ints(5), append_block=ints(60)),
    "append_too_many": lambda b: replace(
        b, append_slot=ints(*b.append_slot, 4), append_block=ints(*b.append_block, 60)
    ),
    "append_held": lambda b: replace(b, append_block=ints(*[1] * len(b.append_block))),
    "append_padding": lambda b: replace(b, append_block=ints(*[0] * len(b.append_block))),
    "append_past_the_pool": lambda b: replace(b, append_block=ints(*[101] * len(b.append_block))),
    "append_negative": lambda b: replace(b, append_block=ints(*[-1] * len(b.append_block))),
    "append_without_block": lambda b: replace(b, append_block=ints()),
    "release": lambda b: replace(b, release_slot=ints(3)),
    "release_of_nobody": lambda b: replace(b, release_slot=ints(5)),
    "admission": lambda b: replace(b, admits=(admission(5, 1, 3, [60]),)),
    "copy": lambda b: replace(b, copy_source=ints(1), copy_destination=ints(60)),
    "half_a_copy": lambda b: replace(b, copy_destination=ints(60)),
    "swap_out": lambda b: replace(b, swap_out_block=ints(1), swap_out_host=ints(1)),
    "half_a_swap": lambda b: replace(b, swap_in_block=ints(1)),
}


class TestSteadyRows:
    def test_repeated_batches_do_what_fully_checked_ones_do(self):
        """
        State and hash stay those of an end that checks each batch in full, over 60 steps.
        """
        slots, planner = after(0)
        checked = deepcopy(slots)
        num_repeated = 0
        for _ in range(60):
            batch = planner.decode()
            checked._steady.clear()
            checked.apply(batch)
            num_repeated += any(steady.is_repeated(slots, batch) for steady in slots._steady)
            slots.apply(batch)
            assert columns(checked) == columns(slots)
            assert checked.state_hash == slots.state_hash == hash_from_scratch(slots)
        assert 59 == num_repeated

    @pytest.mark.parametrize("num_steps", range(8, 12))
    @pytest.mark.parametrize("damage", DAMAGE)
    def test_what_is_no_repetition_is_checked_in_full(self, damage, num_steps):
        """
        A batch other than the next step of the same rows has the outcome, error message included,
        that it has at an end which checks each batch in full.
        """
        slots, planner = after(num_steps)
        assert slots._steady
        damaged = DAMAGE[damage](planner.decode())

        assert outcome(fully_checked(slots), damaged) == outcome(slots, damaged)

    def test_a_block_twice_is_refused(self):
        """
        Two rows that need a block in the same step cannot get the same one.
        """
        slots = state()
        twins = (admission(0, 1, 3, [1]), admission(1, 1, 3, [2]))
        rows = {"row_slot": ints(0, 1), "row_flags": flags(1, 1)}
        slots.apply(Batch(admits=twins, row_start=ints(0, 0), row_num_tokens=ints(3, 3), **rows))
        step = {"row_num_tokens": ints(1, 1), **rows}
        slots.apply(Batch(row_start=ints(3, 3), **step))
        blocks = {"append_slot": ints(0, 1), "append_block": ints(3, 4)}
        slots.apply(Batch(row_start=ints(4, 4), **step, **blocks))
        for start in (5, 6, 7):
            slots.apply(Batch(row_start=ints(start, start), **step))
        same = {"append_slot": ints(0, 1), "append_block": ints(5, 5)}
        batch = Batch(row_start=ints(8, 8), **step, **same)

        assert slots._steady
        assert outcome(fully_checked(slots), batch) == outcome(slots, batch)
        with pytest.raises(SessionLost, match="shares"):
            slots.apply(batch)

    def test_a_full_table_is_refused(self):
        """
        A row with a full block table gets no block.
        """
        slots, planner = after(9)
        slots.max_blocks_per_slot = 4
        # Slot 0 has 12 tokens by now, slot 4 has 16.
        batch = planner.decode()
        assert [0, 4] == batch.append_slot.tolist()
        with pytest.raises(SessionLost, match="append_slot 4 would hold over 4 blocks"):
            slots.apply(batch)

    def test_rows_with_a_block_to_spare_are_checked_in_full(self):
        """
        A row with more blocks than it needs always gets the full checks, and may use its blocks up.
        """
        slots = state()
        row = {"row_slot": ints(2), "row_flags": flags(1)}
        slots.apply(
            Batch(
                admits=(admission(2, 1, 3, [1, 2, 3]),),
                row_start=ints(0),
                row_num_tokens=ints(3),
                **row,
            )
        )
        for start in range(3, 12):
            slots.apply(Batch(row_start=ints(start), row_num_tokens=ints(1), **row))
        with pytest.raises(SessionLost, match="longer than its blocks"):
            slots.apply(Batch(row_start=ints(12), row_num_tokens=ints(1), **row))
        assert np.array_equal([0, 0, 12, 0, 0, 0], slots.planned)

    def test_a_reset_forgets_them(self):
        """
        A reset state takes no batch for a repetition.
        """
        slots, planner = after(9)
        slots.reset()
        with pytest.raises(SessionLost, match="is not live"):
            slots.apply(planner.decode())


def lane_step(
    slots: SlotState, lane: tuple[int, ...], blocks: dict[int, int] | None = None
) -> Batch:
    """Return the next decode step of some slots; those in `blocks` get that block."""
    blocks = blocks or {}
    return Batch(
        row_slot=ints(*lane),
        row_num_tokens=ints(*[1] * len(lane)),
        row_start=slots.planned[list(lane)].copy(),
        row_flags=flags(*[1] * len(lane)),
        append_slot=ints(*blocks),
        append_block=ints(*blocks.values()),
    )


def is_repeated(slots: SlotState, batch: Batch) -> bool:
    return any(steady.is_repeated(slots, batch) for steady in slots._steady)


class TestLanes:
    """Sets of rows that take turns, each of which the batches of the others leave as it is."""

    LANES = ((0, 3), (1, 4))

    def both(self) -> tuple[SlotState, int]:
        """Return a state in which both lanes have decoded twice, and the next block."""
        slots, planner = after(0)
        next_block = planner.next_block
        for _ in range(2):
            for lane in self.LANES:
                next_block = self.decode(slots, lane, next_block)
        return slots, next_block

    def full(self, slots: SlotState, lane: tuple[int, ...], block: int) -> dict[int, int]:
        """Return a block for each slot of a lane whose last one is full."""
        growing = [s for s in lane if slots.planned[s] == slots.num_blocks_held[s] * BLOCK_SIZE]
        return dict(zip(growing, range(block, block + len(growing)), strict=True))

    def decode(self, slots: SlotState, lane: tuple[int, ...], block: int) -> int:
        blocks = self.full(slots, lane, block)
        slots.apply(lane_step(slots, lane, blocks))
        return block + len(blocks)

    def test_turns_are_repetitions(self):
        """
        Lanes in turn get the few checks, with state and hash as at an end that checks all in full.
        """
        slots, block = self.both()
        checked = deepcopy(slots)
        for step in range(40):
            lane = self.LANES[step % 2]
            batch = lane_step(slots, lane, self.full(slots, lane, block))
            block += len(batch.append_block)
            assert is_repeated(slots, batch)
            checked._steady.clear()
            checked.apply(batch)
            slots.apply(batch)
            assert columns(checked) == columns(slots)
            assert checked.state_hash == slots.state_hash == hash_from_scratch(slots)

    @pytest.mark.parametrize("damage", DAMAGE)
    @pytest.mark.parametrize("num_steps", range(4))
    def test_what_is_no_repetition_is_checked_in_full(self, damage, num_steps):
        """
        A batch that is no lane's next step has the outcome that it has at an end which checks each
        batch in full.
        """
        slots, block = self.both()
        for step in range(2 * num_steps):
            block = self.decode(slots, self.LANES[step % 2], block)
        lane = (0, 1, 3, 4)
        batch = lane_step(slots, lane, self.full(slots, lane, block))
        damaged = DAMAGE[damage](batch)
        assert outcome(fully_checked(slots), damaged) == outcome(slots, damaged)

    @pytest.mark.parametrize(
        "change",
        [
            lambda slots: Batch(release_slot=ints(0)),
            lambda slots: lane_step(slots, (0,)),
            lambda slots: replace(lane_step(slots, (1,)), append_slot=ints(0), append_block=ints(90)),
            lambda slots: Batch(admits=(admission(5, 1, 3, [int(slots.block_table[0, 0])]),)),
            lambda slots: replace(
                lane_step(slots, (1,)), append_slot=ints(1),
                append_block=ints(int(slots.blocks_of(0)[-1])),
            ),
        ],
        ids=["release", "a_row_alone", "append", "admission", "shared_block"],
    )  # fmt: skip
    def test_a_lane_that_another_batch_touches_is_checked_in_full(self, change):
        """
        After a batch that changes a slot of a lane, or could share its blocks, the lane's next step
        is no repetition.
        """
        slots, _ = self.both()
        step = lane_step(slots, self.LANES[0], self.full(slots, self.LANES[0], 80))
        assert is_repeated(slots, step)
        slots.apply(change(slots))
        assert not is_repeated(slots, step)
        assert outcome(fully_checked(slots), step) == outcome(slots, step)

    def test_a_lane_with_other_rows_does_not_disturb_the_rest(self):
        """
        When one lane's rows change, the other lane's next step still is a repetition.
        """
        slots, block = self.both()
        slots.apply(lane_step(slots, (1,), self.full(slots, (1,), block)))
        lane = self.LANES[0]
        assert is_repeated(slots, lane_step(slots, lane, self.full(slots, lane, 80)))

    def one_slot_lanes(self, num_lanes: int) -> SlotState:
        """Return slots of as many lanes, one each, with one token."""
        slots = SlotState(num_lanes, WIDTH, BLOCK_SIZE, NUM_BLOCKS)
        for slot in range(num_lanes):
            slots.apply(Batch(
                admits=(admission(slot, 1, 1, [slot + 1]),), row_slot=ints(slot), row_start=ints(0),
                row_num_tokens=ints(1), row_flags=flags(1),
            ))  # fmt: skip
        return slots

    def test_lanes_of_the_most_stages_are_repetitions(self):
        """
        The third step of each lane is a repetition, with as many lanes as there may be stages.
        """
        slots = self.one_slot_lanes(MAX_STAGES)
        for _ in range(2):
            for slot in range(MAX_STAGES):
                slots.apply(lane_step(slots, (slot,)))
        for slot in range(MAX_STAGES):
            step = lane_step(slots, (slot,))
            assert is_repeated(slots, step)
            slots.apply(step)

    def test_few_sets_of_rows_are_kept(self):
        """
        The number of sets that are kept is bounded, however many there are; the newest stay.
        """
        num_lanes = MAX_STEADY + 6
        slots = self.one_slot_lanes(num_lanes)
        for slot in range(num_lanes):
            for _ in range(2):
                slots.apply(lane_step(slots, (slot,)))
        assert MAX_STEADY == len(slots._steady) == slots._is_steady.sum()
        assert len(slots._recent_rows) <= MAX_STEADY
        repeated = [is_repeated(slots, lane_step(slots, (slot,))) for slot in range(num_lanes)]
        assert [False] * 6 + [True] * MAX_STEADY == repeated
