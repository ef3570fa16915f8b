"""
Swapping to host blocks over the step link: what a batch may name, and what both ends remember.
"""

from __future__ import annotations

import pytest

from tandem.errors import SessionLost
from tandem.link.batch import Batch
from tandem.link.codec.wire import decode_request, encode_step
from tandem.link.slots.slot_state import SlotState
from tests.link.values import admission, ints, rows, same, step


@pytest.fixture
def slots():
    """
    Return four slots, 20 blocks of four tokens and 6 host blocks; slot 0 holds blocks 1 and 2, and
    host blocks 1 and 2 were written.
    """
    slots = SlotState(4, 5, 4, 20, num_host_blocks=6)
    slots.apply(Batch(admits=(admission(0, 1, 6, [1, 2]),), **rows((0, 0, 6, 1))))
    slots.apply(Batch(swap_out_block=ints(1, 2), swap_out_host=ints(1, 2)))
    return slots


def frozen(slots: SlotState) -> tuple[object, ...]:
    return (
        slots.is_host_written.tolist(),
        slots.live.tolist(),
        slots.num_holders.tolist(),
        slots.state_hash,
    )


class TestApply:
    def test_swapped_out_host_blocks_count_as_written(self, slots):
        """
        The destinations of swaps out, and no other host blocks, may be read, any number of times.
        """
        assert [1, 2] == slots.is_host_written.nonzero()[0].tolist()
        for _ in range(2):
            slots.apply(Batch(swap_in_host=ints(1, 2), swap_in_block=ints(8, 9)))
        assert [1, 2] == slots.is_host_written.nonzero()[0].tolist()

    def test_a_whole_preemption_fits_two_batches(self, slots):
        """
        A row is released and swapped out by one batch, swapped in and admitted elsewhere by a later
        one.
        """
        slots.apply(
            Batch(release_slot=ints(0), swap_out_block=ints(1, 2), swap_out_host=ints(3, 4))
        )
        slots.apply(
            Batch(
                swap_in_host=ints(3, 4),
                swap_in_block=ints(2, 1),
                admits=(admission(3, 1, 7, [2, 1], cached=6),),
                **rows((3, 6, 1, 1)),
            )
        )
        assert [2, 1] == slots.blocks_of(3).tolist()
        assert 7 == slots.planned[3]

    def test_block_released_and_swapped_out_serves_the_same_batch(self, slots):
        """
        A block that a batch swaps out may be written by a copy or a swap in of the same batch,
        which come later.
        """
        slots.apply(
            Batch(
                release_slot=ints(0),
                swap_out_block=ints(1, 2),
                swap_out_host=ints(3, 4),
                copy_source=ints(9),
                copy_destination=ints(1),
                swap_in_host=ints(1),
                swap_in_block=ints(2),
                admits=(admission(1, 1, 7, [1, 2], cached=6),),
            )
        )
        assert [1, 2] == slots.blocks_of(1).tolist()

    def test_swaps_leave_the_hash_alone(self, slots):
        """
        Swaps move content, not ownership, so they leave the hash alone.
        """
        before = slots.state_hash
        slots.apply(Batch(swap_out_block=ints(2), swap_out_host=ints(5)))
        slots.apply(Batch(swap_in_host=ints(5), swap_in_block=ints(9)))
        assert before == slots.state_hash

    def test_reset_forgets_what_was_written(self, slots):
        """
        A new session finds no host block written.
        """
        slots.reset()
        with pytest.raises(SessionLost, match="swap_in_host 1 was never written"):
            slots.apply(Batch(swap_in_host=ints(1), swap_in_block=ints(9)))


BAD = {
    "swap_out_host has 0 entries, its group 1": Batch(swap_out_block=ints(1)),
    "swap_out_block 0 is outside 1 to 20": Batch(swap_out_block=ints(0), swap_out_host=ints(3)),
    "swap_out_block 21 is outside 1 to 20": Batch(swap_out_block=ints(21), swap_out_host=ints(3)),
    "swap_out_host 0 is outside 1 to 6": Batch(swap_out_block=ints(1), swap_out_host=ints(0)),
    "swap_out_host 7 is outside 1 to 6": Batch(swap_out_block=ints(1), swap_out_host=ints(7)),
    "swap_out_host 3 stands there twice": Batch(
        swap_out_block=ints(1, 2), swap_out_host=ints(3, 3)
    ),
    "swap_in_block has 0 entries, its group 1": Batch(swap_in_host=ints(1)),
    "swap_in_host 0 is outside 1 to 6": Batch(swap_in_host=ints(0), swap_in_block=ints(9)),
    "swap_in_host 7 is outside 1 to 6": Batch(swap_in_host=ints(7), swap_in_block=ints(9)),
    "swap_in_block 0 is outside 1 to 20": Batch(swap_in_host=ints(1), swap_in_block=ints(0)),
    "swap_in_block 21 is outside 1 to 20": Batch(swap_in_host=ints(1), swap_in_block=ints(21)),
    "swap_in_host 3 was never written": Batch(swap_in_host=ints(3), swap_in_block=ints(9)),
    "host block 2 is swapped in and out by one batch": Batch(
        swap_out_block=ints(1),
        swap_out_host=ints(2),
        swap_in_host=ints(1, 2),
        swap_in_block=ints(8, 9),
    ),
    "swap_in_block 9 stands there twice": Batch(swap_in_host=ints(1, 2), swap_in_block=ints(9, 9)),
    "block 9 is the destination of a copy and of a swap": Batch(
        copy_source=ints(1),
        copy_destination=ints(9),
        swap_in_host=ints(1),
        swap_in_block=ints(9),
    ),
    "swap_in_block 2 is held by a live slot": Batch(swap_in_host=ints(1), swap_in_block=ints(2)),
}


class TestRefusal:
    @pytest.mark.parametrize("problem", BAD)
    def test_inconsistent_swap_changes_nothing(self, slots, problem):
        """
        A swap that does not fit ends the session naming what is wrong, and leaves the state as it was.
        """
        before = frozen(slots)
        with pytest.raises(SessionLost) as error:
            slots.apply(BAD[problem])
        assert problem in error.value.message
        assert before == frozen(slots)

    def test_without_host_blocks_nothing_can_be_swapped(self):
        """
        An executor without host blocks refuses every swap.
        """
        slots = SlotState(4, 5, 4, 20)
        with pytest.raises(SessionLost, match="swap_out_host 1 is outside 1 to 0"):
            slots.apply(Batch(swap_out_block=ints(1), swap_out_host=ints(1)))


class TestEncoding:
    def test_swaps_arrive_as_they_were_sent(self):
        """
        Every swap column keeps its own values on the way.
        """
        value = step(
            1,
            command=Batch(
                swap_out_block=ints(1, 2),
                swap_out_host=ints(3, 4),
                swap_in_host=ints(5, 6, 7),
                swap_in_block=ints(8, 9, 10),
            ),
        )
        assert same(value, decode_request(encode_step(value)))

    def test_batch_without_swaps_spends_no_byte_on_them(self):
        """
        Empty columns do not travel.
        """
        bare = step(1, command=Batch(**rows((0, 6, 1, 1))))
        swaps = step(
            1, command=Batch(**rows((0, 6, 1, 1)), swap_out_block=ints(1), swap_out_host=ints(1))
        )
        assert len(encode_step(swaps)) == len(encode_step(bare)) + 2 * (2 + 4)
