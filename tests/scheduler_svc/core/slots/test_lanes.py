"""Lanes by themselves: which slot is in which, and when."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from scheduler_svc.core.slots.lanes import Hold, Lanes
from tandem.errors import InternalError

NUM_SLOTS = 12


class Table:
    """Lanes of slots that decode, with what the slot table tells about them."""

    def __init__(self, num_lanes: int) -> None:
        self.lanes = Lanes(num_lanes, NUM_SLOTS)
        self.decoding = np.zeros(NUM_SLOTS, np.bool_)
        self.planned = np.zeros(NUM_SLOTS, np.int32)
        self.applied = np.zeros(NUM_SLOTS, np.int32)

    def join(self, *slots: int) -> None:
        for slot in slots:
            self.decoding[slot] = True
            self.lanes.join(slot)

    def leave(self, *slots: int) -> None:
        for slot in slots:
            self.decoding[slot] = False
            self.lanes.leave(slot)

    def turn(self) -> list[int]:
        """Let the next lane have its turn; return the slots that it may decode."""
        self.lanes.take_turn()
        admission = np.arange(NUM_SLOTS, dtype=np.int64)
        self.lanes.settle(self.decoding, self.planned, self.applied, admission)
        self.lanes.check_integrity(self.decoding)
        return self.lanes.select(self.decoding.nonzero()[0]).tolist()


class TestLanes:
    def test_one_lane_has_all_slots_at_every_turn(self):
        """
        Without stages every decoding slot is in every step.
        """
        table = Table(1)
        table.join(3, 0, 5)
        assert [[0, 3, 5]] * 3 == [table.turn() for _ in range(3)]

    @pytest.mark.parametrize("num_lanes", [2, 3, 4])
    def test_slots_spread_evenly(self, num_lanes):
        """
        Slots that join together spread over all lanes; in turn these have every slot once.
        """
        table = Table(num_lanes)
        table.join(*range(10))
        for _ in range(num_lanes):
            table.turn()
        turns = [table.turn() for _ in range(num_lanes)]
        assert list(range(10)) == sorted(chain.from_iterable(turns))
        assert max(map(len, turns)) == -(-10 // num_lanes)

    def test_a_slot_sits_out_the_turn_that_comes_too_soon(self):
        """
        A slot whose last chunk is in another lane's step is not in the next step of its own lane;
        one of the lane that has its turn waits for that alone.
        """
        table = Table(3)
        table.planned[:3] = 9  # in flight
        table.join(0, 1, 2)
        turns = [table.turn() for _ in range(6)]
        assert [[], [], [0]] == turns[:3]
        assert [[0], [1], [2]] == sorted(turns[3:])

    def test_slots_that_go_on_are_given_away_at_the_next_turn(self):
        """
        Slots that were paused go on in the lane that they had, also where it took others meanwhile,
        and are shared anew at its next turn.
        """
        table = Table(2)
        table.join(0, 1, 2, 3)
        first = next(slots for _ in range(2) if 0 in (slots := table.turn()))
        table.leave(*first)
        table.turn()  # the other lane gives one of its two slots away
        table.turn()
        for slot in first:
            table.decoding[slot] = True
            table.lanes.rejoin(slot)
        assert 3 == max(table.lanes.count)
        turns = [table.turn() for _ in range(4)]
        assert 2 == max(map(len, turns[1:]))

    def test_a_slot_that_is_computed_nowhere_sits_out_no_turn(self):
        """
        A slot with all its results seen may run at once.
        """
        table = Table(2)
        table.join(0, 1)
        assert [[1], [0]] == [table.turn(), table.turn()]

    def test_a_slot_moves_once_it_is_computed_nowhere(self):
        """
        A lane with two slots more gives one away, which is in no step until its results are seen.
        """
        table = Table(2)
        table.join(0, 1, 2, 3)
        first, second = table.turn(), table.turn()
        table.leave(*first)
        table.planned[second] = 9
        assert [] == table.turn()
        kept = table.turn()
        moved = [slot for slot in second if slot not in kept]
        assert [second[0]] == kept
        for _ in range(4):
            assert not set(moved) & set(table.turn())
        table.applied[moved] = 9
        assert [moved, kept] == [table.turn(), table.turn()]

    def test_a_slot_that_is_computed_nowhere_moves_first_and_at_once(self):
        """
        Of the slots of a lane one without results under way is given away, and runs on without a
        pause.
        """
        table = Table(2)
        table.join(0, 1, 2, 3)
        first, second = table.turn(), table.turn()
        table.leave(*first)
        table.planned[second[1]] = 9
        table.turn()
        assert [[second[1]], [second[0]]] == [table.turn(), table.turn()]

    def test_a_slot_that_is_given_back_in_flight_sits_out_no_turn_of_its_lane(self):
        """
        A slot that comes back to the lane whose steps compute it need not wait for their results.
        """
        table = Table(2)
        table.join(*range(6))
        table.planned[:6] = 9  # in flight
        assert [[], [0, 2, 4]] == [table.turn(), table.turn()]
        table.leave(2, 4)
        assert [1, 3] == table.turn(), "slot 5 is given away"
        table.leave(1, 3)
        assert [[0], [5]] == [table.turn(), table.turn()]

    def test_a_paused_slot_comes_back_to_its_lane(self):
        """
        A slot that decodes again is in the lane in which it was, and does not count meanwhile.
        """
        table = Table(2)
        table.join(0, 1)
        turn = table.turn()
        table.leave(*turn)
        assert 1 == table.lanes.num_busy
        table.decoding[turn] = True
        table.lanes.rejoin(turn[0])
        table.turn()
        assert turn == table.turn()

    @pytest.mark.parametrize(
        "damage",
        [
            lambda lanes: lanes.count.__setitem__(0, 5),
            lambda lanes: lanes.held.__setitem__(7, Hold(0)),
            lambda lanes: setattr(lanes, "turn", 2),
        ],
        ids=["count", "held", "turn"],
    )
    def test_damage_is_found(self, damage):
        """
        A wrong count, a held slot that does not decode, and a turn of no lane are found.
        """
        table = Table(2)
        table.join(0, 1, 2)
        damage(table.lanes)
        with pytest.raises(InternalError):
            table.lanes.check_integrity(table.decoding)
