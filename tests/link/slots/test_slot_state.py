"""The mirrored slot state: what a batch may do, and that a refused batch changes nothing."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.errors import SessionLost
from tandem.link.batch import Batch
from tandem.link.slots.slot_state import SlotState
from tests.link.slots.whole_hash import hash_from_scratch
from tests.link.values import admission, flags, ints, rows

COLUMNS = (
    "live",
    "generation",
    "planned",
    "num_tokens_known",
    "num_blocks_held",
    "block_table",
    "num_holders",
)


@pytest.fixture
def slots():
    """
    Return four slots of up to five blocks of four tokens, 20 blocks; slot 0 has 6 tokens in blocks
    1 and 2, all computed and the next one sampled, slot 1 has 3 of 9 tokens computed in block 3.
    """
    slots = SlotState(4, 5, 4, 20)
    slots.apply(
        Batch(
            admits=(admission(0, 1, 6, [1, 2]), admission(1, 1, 9, [3])),
            **rows((0, 0, 6, 1), (1, 0, 3, 0)),
        )
    )
    return slots


def frozen(slots: SlotState) -> dict[str, object]:
    """Return everything that a batch could change."""
    state: dict[str, object] = {name: getattr(slots, name).tolist() for name in COLUMNS}
    state["hash"] = slots.state_hash
    return state


class TestApply:
    def test_admission_fills_a_slot(self, slots):
        """
        An admitted slot is live, planned up to its cached tokens, and holds its blocks in order.
        """
        slots.apply(Batch(admits=(admission(2, 7, 6, [9, 4], cached=4),)))
        assert (True, 7, 4, 6) == (
            slots.live[2],
            slots.generation[2],
            slots.planned[2],
            slots.num_tokens_known[2],
        )
        assert [9, 4] == slots.blocks_of(2).tolist()

    def test_rows_advance_planned(self, slots):
        """
        A row moves its slot's planned length by its number of tokens.
        """
        slots.apply(Batch(**rows((0, 6, 1, 1), (1, 3, 1, 0))))
        assert [7, 4] == slots.planned[:2].tolist()

    def test_sampling_makes_one_more_token_known(self, slots):
        """
        A sampled token can be the input of the next step although its value is unknown here.
        """
        slots.apply(Batch(**rows((0, 6, 1, 1))))
        slots.apply(Batch(**rows((0, 7, 1, 1))))
        assert (8, 9) == (slots.planned[0], slots.num_tokens_known[0])

    def test_appends_go_to_the_end_in_order(self, slots):
        """
        Blocks appended to one slot stand in its table in batch order, among those of other slots.
        """
        slots.apply(Batch(append_slot=ints(1, 0, 1, 1), append_block=ints(8, 7, 6, 5)))
        assert [3, 8, 6, 5] == slots.blocks_of(1).tolist()
        assert [1, 2, 7] == slots.blocks_of(0).tolist()

    def test_release_empties_a_slot(self, slots):
        """
        A released slot is free and its blocks have no holder; its generation is remembered.
        """
        slots.apply(Batch(release_slot=ints(0)))
        assert (False, 0, 0) == (slots.live[0], slots.planned[0], slots.num_blocks_held[0])
        assert 1 == slots.generation[0]
        assert [0, 0, 1] == slots.num_holders[1:4].tolist()

    def test_released_slot_and_blocks_serve_the_same_batch(self, slots):
        """
        A slot and blocks that a batch releases may be used again by the same batch, under a new
        generation.
        """
        slots.apply(
            Batch(release_slot=ints(0), admits=(admission(0, 2, 4, [2]),), **rows((0, 0, 4, 1)))
        )
        assert [2] == slots.blocks_of(0).tolist()
        assert (2, 4) == (slots.generation[0], slots.planned[0])

    def test_cached_blocks_may_be_shared(self, slots):
        """
        A full block may stand in several block tables; only the later blocks are written.
        """
        slots.apply(Batch(admits=(admission(2, 1, 6, [1, 9], cached=4),), **rows((2, 4, 2, 1))))
        assert 2 == slots.num_holders[1]

    def test_row_may_fill_several_blocks(self, slots):
        """
        One row may write into admitted and appended blocks alike.
        """
        slots.apply(Batch(append_slot=ints(1, 1), append_block=ints(4, 5), **rows((1, 3, 6, 1))))
        assert 9 == slots.planned[1]

    def test_reset_forgets_generations(self, slots):
        """
        A reset frees every slot, and generations may start anew.
        """
        slots.reset()
        assert frozen(SlotState(4, 5, 4, 20))["hash"] == slots.state_hash == 0
        slots.apply(Batch(admits=(admission(0, 1, 6, [1, 2]),)))
        assert 1 == slots.generation[0]


BAD = {
    "release_slot 4 is outside 0 to 3": Batch(release_slot=ints(4)),
    "release_slot -1 is outside 0 to 3": Batch(release_slot=ints(-1)),
    "release_slot 0 stands there twice": Batch(release_slot=ints(0, 0)),
    "release_slot 2 is not live": Batch(release_slot=ints(0, 2)),
    "copy_destination has 0 entries, its group 1": Batch(copy_source=ints(1)),
    "copy_source 0 is outside 1 to 20": Batch(copy_source=ints(0), copy_destination=ints(9)),
    "copy_destination 21 is outside 1 to 20": Batch(copy_source=ints(1), copy_destination=ints(21)),
    "copy_destination 9 stands there twice": Batch(
        copy_source=ints(1, 2), copy_destination=ints(9, 9)
    ),
    "block 9 is both source and destination of a copy": Batch(
        copy_source=ints(1, 9), copy_destination=ints(9, 8)
    ),
    "copy_destination 3 is held by a live slot": Batch(
        copy_source=ints(1), copy_destination=ints(3)
    ),
    "admitted slot 4 is outside 0 to 3": Batch(admits=(admission(4, 1, 1, [9]),)),
    "admitted slot 1 is live": Batch(admits=(admission(1, 2, 1, [9]),)),
    "admitted slot 2 is live": Batch(admits=(admission(2, 1, 1, [9]), admission(2, 2, 1, [10]))),
    "slot 0 is admitted with generation 1, its last one was 1": Batch(
        release_slot=ints(0), admits=(admission(0, 1, 1, [9]),)
    ),
    "slot 2 is admitted with 6 blocks": Batch(
        admits=(admission(2, 1, 1, [9, 10, 11, 12, 13, 14]),)
    ),
    "slot 2 is admitted with 0 tokens": Batch(admits=(admission(2, 1, 0, [9]),)),
    "slot 2 is admitted with 21 tokens": Batch(admits=(admission(2, 1, 21, [9]),)),
    "slot 2 is admitted with 4 cached tokens of 4": Batch(
        admits=(admission(2, 1, 4, [9], cached=4),)
    ),
    "slot 2 is admitted with 5 cached tokens of 9, in 1 blocks": Batch(
        admits=(admission(2, 1, 9, [9], cached=5),)
    ),
    "a block admitted to slot 2 0 is outside 1 to 20": Batch(admits=(admission(2, 1, 1, [0]),)),
    "append_block has 0 entries, its group 1": Batch(append_slot=ints(1)),
    "append_slot 9 is outside 0 to 3": Batch(append_slot=ints(9), append_block=ints(9)),
    "append_slot 2 is not live": Batch(append_slot=ints(2), append_block=ints(9)),
    "append_slot 0 is not live": Batch(
        release_slot=ints(0), append_slot=ints(0), append_block=ints(9)
    ),
    "append_block 21 is outside 1 to 20": Batch(append_slot=ints(1), append_block=ints(21)),
    "append_slot 0 would hold over 5 blocks": Batch(
        append_slot=ints(0, 0, 0, 0), append_block=ints(9, 10, 11, 12)
    ),
    "row_flags has 0 entries, its group 1": Batch(**{**rows((0, 6, 1, 1)), "row_flags": flags()}),
    "row_slot 4 is outside 0 to 3": Batch(**rows((4, 0, 1, 0))),
    "row_slot 0 stands there twice": Batch(**rows((0, 6, 1, 1), (0, 7, 1, 1))),
    "row_slot 2 is not live": Batch(**rows((2, 0, 1, 0))),
    "the row of slot 0 has an unknown flag": Batch(**rows((0, 6, 1, 3))),
    "the row of slot 1 starts elsewhere than planned": Batch(**rows((1, 4, 1, 0))),
    "the row of slot 1 computes no token": Batch(**rows((1, 3, 0, 0))),
    "the row of slot 1 is longer than its blocks": Batch(**rows((1, 3, 2, 0))),
    "the row of slot 0 is longer than its blocks": Batch(**rows((0, 6, 2**31 - 1, 0))),
    "the row of slot 0 computes a position without a token": Batch(**rows((0, 6, 2, 1))),
    "the row of slot 1 samples a token that is known": Batch(**rows((1, 3, 1, 1))),
    "the row of slot 2 writes into a block it shares": Batch(
        admits=(admission(2, 1, 6, [1, 2], cached=4),), **rows((2, 4, 2, 1))
    ),
    "the row of slot 0 writes into a block it shares": Batch(
        admits=(admission(2, 1, 9, [1, 2, 9], cached=8),), **rows((0, 6, 1, 1))
    ),
    "the row of slot 1 writes into a block it shares": Batch(
        append_slot=ints(1), append_block=ints(2), **rows((1, 3, 4, 0))
    ),
    "the row of slot 3 writes into a block it shares": Batch(
        admits=(admission(3, 1, 8, [9, 9]),), **rows((3, 0, 8, 1))
    ),
}


class TestRefusal:
    @pytest.mark.parametrize("problem", BAD)
    def test_inconsistent_batch_changes_nothing(self, slots, problem):
        """
        A batch that does not fit ends the session naming what is wrong, and leaves the state as it was.
        """
        before = frozen(slots)
        with pytest.raises(SessionLost) as error:
            slots.apply(BAD[problem])
        assert problem in error.value.message
        assert before == frozen(slots)

    def test_late_problem_undoes_nothing_because_nothing_was_done(self, slots):
        """
        A batch with a wrong last row does not apply its releases, admissions and appends either.
        """
        before = frozen(slots)
        batch = Batch(
            release_slot=ints(0),
            admits=(admission(2, 1, 4, [1]),),
            append_slot=ints(1),
            append_block=ints(2),
            **rows((2, 0, 4, 1), (1, 4, 1, 0)),
        )
        with pytest.raises(SessionLost, match="slot 1 starts elsewhere"):
            slots.apply(batch)
        assert before == frozen(slots)


class TestHash:
    def test_hash_follows_every_kind_of_change(self, slots):
        """
        The running hash equals that of the columns after admissions, appends, rows and releases.
        """
        batches = (
            Batch(admits=(admission(2, 3, 6, [1, 9], cached=4),), **rows((2, 4, 2, 1))),
            Batch(append_slot=ints(1, 1, 2), append_block=ints(5, 6, 7), **rows((1, 3, 6, 1))),
            Batch(release_slot=ints(0, 2), **rows((1, 9, 1, 1))),
            Batch(admits=(admission(0, 2, 4, [1]),), release_slot=ints(1), **rows((0, 0, 4, 1))),
        )
        seen = [slots.state_hash]
        for batch in batches:
            slots.apply(batch)
            assert hash_from_scratch(slots) == slots.state_hash
            seen.append(slots.state_hash)
        assert len(seen) == len(set(seen))

    @pytest.mark.parametrize("column", ["generation", "planned", "num_blocks_held", "block_table"])
    def test_hash_covers_every_column(self, slots, column):
        """
        A live slot that differs in generation, planned length or any block differs in hash.
        """
        before = hash_from_scratch(slots)
        getattr(slots, column)[(0, 1) if column == "block_table" else 0] += 1
        assert before != hash_from_scratch(slots)

    def test_free_slots_do_not_count(self, slots):
        """
        The former content of a free slot has no part in the hash.
        """
        slots.apply(Batch(release_slot=ints(0, 1)))
        assert 0 == slots.state_hash

    def test_copies_do_not_count(self, slots):
        """
        Copies move content, not ownership, so they leave the hash alone.
        """
        before = slots.state_hash
        slots.apply(Batch(copy_source=ints(1), copy_destination=ints(9)))
        assert before == slots.state_hash

    def test_way_to_a_state_does_not_count(self):
        """
        Two histories that end in the same slots have the same hash.
        """
        one, other = SlotState(2, 5, 4, 20), SlotState(2, 5, 4, 20)
        one.apply(Batch(admits=(admission(0, 2, 9, [3, 4, 5]),), **rows((0, 0, 8, 0))))
        other.apply(Batch(admits=(admission(0, 1, 5, [7]), admission(1, 1, 5, [8]))))
        other.apply(Batch(release_slot=ints(0, 1), admits=(admission(0, 2, 9, [3]),)))
        other.apply(Batch(**rows((0, 0, 4, 0))))
        other.apply(Batch(append_slot=ints(0, 0), append_block=ints(4, 5), **rows((0, 4, 4, 0))))
        assert one.state_hash == other.state_hash
        assert np.array_equal(one.blocks_of(0), other.blocks_of(0))
