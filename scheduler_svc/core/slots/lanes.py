"""
Lanes: disjoint sets of decoding slots that take turns in the steps of an executor with stages.

A token is known only when its step has left the last pipeline stage. So an executor of N stages has
work for all of them only while N steps in a row compute different rows: a step decodes one lane,
and the next step the next lane.

    lanes of 3 stages    A: slots 0 3 6    B: slots 1 4 7    C: slots 2 5
    steps                A  B  C  A  B  C  A ...
    stage 0 computes     A  B  C  A
    stage 1 computes        A  B  C
    stage 2 computes           A  B         then A's tokens are known, and A's next step begins

A slot joins the smallest lane with the last chunk of its prompt. If that chunk is in the step of
another lane, the slot sits out its lane's next turn, which comes too soon after it. At its turn a
lane that has two slots more than the smallest one gives a slot away; the slot is in no step until
none is in flight that computes it, unless it comes back to the lane whose steps these are. So lanes
differ by one slot at most when they decode: no step decodes more than one N-th of the decoding
slots, rounded up, but for slots that were paused until this step: they go on in the lane that they
had, and are given away at its next turn.

An executor without stages has one lane, and nothing here changes its steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.invariants import require
from tandem.link.batch import Int32Column


class Hold(NamedTuple):
    """
    Reason for which a decoding slot is in no step yet.

    Attributes:
        lane: The lane whose steps in flight compute the slot.
        turn: Number of the turn from which on the slot may be in a step while others compute it;
            None: at none. Once none computes it, it may in any case.
    """

    lane: int
    turn: int | None = None


class Lanes:
    """
    Lane of each decoding slot, and the lane that has its turn; owned by the slot table.

    A paused slot stays in its lane without counting.

    Attributes:
        num_lanes: Number of lanes, at least 1.
        turn: The lane of the step being planned.
        count: Number of decoding slots of each lane.
        held: Decoding slots that are in no step yet.
    """

    __slots__ = ("_lane", "_num_turns", "count", "held", "num_lanes", "turn")

    def __init__(self, num_lanes: int, num_slots: int) -> None:
        self.num_lanes = num_lanes
        self.turn = 0
        self.count = [0] * num_lanes
        self.held: dict[int, Hold] = {}
        self._lane = np.zeros(num_slots, np.int32)
        self._num_turns = 0

    @property
    def num_busy(self) -> int:
        """Number of lanes with a decoding slot."""
        return self.num_lanes - self.count.count(0)

    def take_turn(self) -> None:
        """Let the next lane have its turn."""
        self.turn = (self.turn + 1) % self.num_lanes
        self._num_turns += 1

    def join(self, slot: int) -> None:
        """
        Add a slot, whose last prompt chunk is in the step being planned, to the smallest lane;
        of several such lanes to the one whose next turn is last, which is the lane of this step
        where it is one of them.
        """
        lanes = range(self.turn, self.turn - self.num_lanes, -1)
        lane = min((one % self.num_lanes for one in lanes), key=self.count.__getitem__)
        self._lane[slot] = lane
        self.count[lane] += 1
        if lane != self.turn:
            self.held[slot] = Hold(self.turn, self._num_turns + self.num_lanes)

    def rejoin(self, slot: int) -> None:
        """Add a slot that was paused to its lane again."""
        self.count[self._lane[slot]] += 1

    def leave(self, slot: int) -> None:
        """Take out a slot that decodes no more."""
        self.count[self._lane[slot]] -= 1
        self.held.pop(slot, None)

    def is_uneven(self) -> bool:
        """Return True while the lane of this turn has a slot to give away."""
        return self.count[self.turn] > min(self.count) + 1

    def settle(
        self,
        decoding: NDArray[np.bool_],
        planned: Int32Column,
        applied: Int32Column,
        admission: NDArray[np.int64],
    ) -> bool:
        """
        Let go of the slots that were held for long enough, and let the lane of this turn give slots
        away: those that no step in flight computes first, then those that were admitted last.

        Args:
            decoding: True for each slot that decodes, shape ``[slots]`` as all of these.
            planned: Tokens sent for computing.
            applied: Tokens computed, as far as results were seen.
            admission: Number of the admission to each slot.

        Returns:
            True when the rows of any lane changed.
        """
        free = [
            slot
            for slot, (_, turn) in self.held.items()
            if planned[slot] == applied[slot] or (turn is not None and turn <= self._num_turns)
        ]
        for slot in free:
            del self.held[slot]
        if not self.is_uneven():
            return bool(free)
        own = decoding.nonzero()[0]
        own = own[self._lane[own] == self.turn]
        order = np.lexsort((-admission[own], planned[own] > applied[own]))
        for slot in own[order].tolist():
            if not self.is_uneven():
                break
            self._move(slot, is_in_flight=bool(planned[slot] > applied[slot]))
        return True

    def _move(self, slot: int, *, is_in_flight: bool) -> None:
        self.count[self.turn] -= 1
        lane = self.count.index(min(self.count))
        self._lane[slot] = lane
        self.count[lane] += 1
        hold = self.held.pop(slot, None)
        computed_in = self.turn if hold is None else hold.lane
        if is_in_flight and lane != computed_in:
            self.held[slot] = Hold(computed_in)

    def select(self, slots: NDArray[np.intp], lane: int | None = None) -> NDArray[np.intp]:
        """
        Return those of these decoding slots, in their order, that steps of a lane may compute, by
        default of the lane that has its turn.
        """
        is_own = self._lane[slots] == (self.turn if lane is None else lane)
        own: NDArray[np.intp] = slots[is_own]
        return own[~np.isin(own, list(self.held))] if self.held else own

    def check_integrity(self, decoding: NDArray[np.bool_]) -> None:
        """
        Compare with the decoding slots, shape ``[slots]``.

        Raises:
            InternalError: A lane counts other slots than it has, or one is held that is in none.
        """
        slots = decoding.nonzero()[0]
        count = np.bincount(self._lane[slots], minlength=self.num_lanes).tolist()
        require(count == self.count, "a lane counts other slots than it has")
        require(self.held.keys() <= set(slots.tolist()), "a slot is held that does not decode")
        is_turn = 0 <= self.turn < self.num_lanes
        require(is_turn, "a lane has its turn that is none")
