"""Bugs planted in the lanes of an executor with stages: the random walks find each of them."""

from __future__ import annotations

import re

import pytest

from scheduler_svc.core.batch import planner
from scheduler_svc.core.slots import slots
from scheduler_svc.core.slots.lanes import Lanes
from tests.scheduler_svc.core.properties.random_walk import walk_full_lanes


def turn_by(choose):
    """Return a way to take turns: `choose` returns the next lane, given the lanes."""

    def take_turn(lanes):
        lanes._num_turns += 1
        lanes.turn = choose(lanes) % lanes.num_lanes

    return take_turn


def never_rotate(monkeypatch):
    """One lane has all turns."""
    monkeypatch.setattr(Lanes, "take_turn", turn_by(lambda lanes: lanes.turn))


def prefer_the_fullest(monkeypatch):
    """The lane with most decodes has its turn, the first of several."""
    monkeypatch.setattr(
        Lanes, "take_turn", turn_by(lambda lanes: lanes.count.index(max(lanes.count)))
    )


def skip_a_lane(monkeypatch):
    """The last lane has no turn while any other has decodes."""

    def choose(lanes):
        return 0 if lanes.turn == lanes.num_lanes - 2 and any(lanes.count[:-1]) else lanes.turn + 1

    monkeypatch.setattr(Lanes, "take_turn", turn_by(choose))


def skip_every_third_turn(monkeypatch):
    """The lane that is next loses every third turn."""
    monkeypatch.setattr(
        Lanes,
        "take_turn",
        turn_by(lambda lanes: lanes.turn + (2 if lanes._num_turns % 3 == 0 else 1)),
    )


def take_two_turns_at_a_time(monkeypatch):
    """Every plan passes a lane over."""
    next_lane = slots.SlotTable.next_lane

    def pass_over(table):
        next_lane(table)
        next_lane(table)

    monkeypatch.setattr(slots.SlotTable, "next_lane", pass_over)


def stay_for_two_turns(monkeypatch):
    """Each lane is decoded twice before the next one."""
    monkeypatch.setattr(
        Lanes, "take_turn", turn_by(lambda lanes: lanes.turn + lanes._num_turns % 2)
    )


def stay_for_two_turns_now_and_then(monkeypatch):
    """One of seven turns is the same lane's again."""
    monkeypatch.setattr(
        Lanes, "take_turn", turn_by(lambda lanes: lanes.turn + bool(lanes._num_turns % 7))
    )


def turn_back(monkeypatch):
    """Turns go to the last lane and back again."""

    def choose(lanes):
        period = 2 * max(lanes.num_lanes - 1, 1)
        place = lanes._num_turns % period
        return min(place, period - place)

    monkeypatch.setattr(Lanes, "take_turn", turn_by(choose))


def begin_anew_with_each_join(monkeypatch):
    """After a prompt is computed the turns begin with the first lane."""
    join, joined = Lanes.join, set()

    def note_and_join(lanes, slot):
        joined.add(lanes)
        join(lanes, slot)

    def choose(lanes):
        begins = lanes in joined
        joined.discard(lanes)
        return 0 if begins else lanes.turn + 1

    monkeypatch.setattr(Lanes, "join", note_and_join)
    monkeypatch.setattr(Lanes, "take_turn", turn_by(choose))


def hold_for_ever(monkeypatch):
    """A slot that is held is in no step again."""
    settle = Lanes.settle

    def keep_held(lanes, *columns):
        held = dict(lanes.held)
        is_changed = settle(lanes, *columns)
        lanes.held |= held
        return is_changed

    monkeypatch.setattr(Lanes, "settle", keep_held)


def push_ahead(monkeypatch):
    """At its turn a lane gives one of several slots to the lane that had its turn before."""

    def settle(lanes, decoding, planned, applied, _admission):
        own = decoding.nonzero()[0]
        own = own[(lanes._lane[own] == lanes.turn) & (planned[own] == applied[own])]
        lanes.held.clear()
        for slot in own[: lanes.count[lanes.turn] > 1].tolist():
            lanes.count[lanes.turn] -= 1
            lanes._lane[slot] = (lanes.turn - 1) % lanes.num_lanes
            lanes.count[lanes._lane[slot]] += 1
        return True

    monkeypatch.setattr(Lanes, "is_uneven", lambda _: True)
    monkeypatch.setattr(Lanes, "settle", settle)


def move_in_flight(monkeypatch):
    """A slot that is given away is in the next step of its new lane."""
    move = Lanes._move
    monkeypatch.setattr(
        Lanes, "_move", lambda lanes, slot, *, is_in_flight: move(lanes, slot, is_in_flight=False)
    )


def never_give_away(monkeypatch):
    """Lanes stay as uneven as ends leave them."""
    monkeypatch.setattr(Lanes, "is_uneven", lambda _: False)


def join_one_lane(monkeypatch):
    """All prompts join the first lane, which gives none away."""

    def join(lanes, slot):
        lanes._lane[slot] = 0
        lanes.count[0] += 1

    monkeypatch.setattr(Lanes, "join", join)
    monkeypatch.setattr(Lanes, "is_uneven", lambda _: False)


def decode_all_lanes(monkeypatch):
    """A step decodes all lanes."""
    monkeypatch.setattr(Lanes, "select", lambda _, ready, _lane=None: ready)


def stop_at_an_empty_lane(monkeypatch):
    """A lane without decodes costs a plan that computes nothing."""
    monkeypatch.setattr(planner, "_skip_empty_lanes", lambda _: None)


def repeat_the_rows_of_the_lane_before(monkeypatch):
    """Rows stay those of the last lane while no request comes or goes."""

    def next_lane(table):
        table._lanes.take_turn()
        held = table._lanes.held
        if held and table._lanes.settle(
            table.decoding, table.planned, table.tokens.applied, table.admitted.turn
        ):
            table._forget_rows()

    monkeypatch.setattr(slots.SlotTable, "next_lane", next_lane)


TURNS = (
    "a lane starves|a decode is computed again before another lane's turn"
    "|a decode is left out for ever"
)
OTHER_LANE = "a step decodes another lane than that of its turn"
UNEVEN = "a lane decodes more than its share"
PLANTED = {
    never_rotate: TURNS,
    prefer_the_fullest: TURNS,
    skip_a_lane: TURNS,
    skip_every_third_turn: TURNS,
    take_two_turns_at_a_time: TURNS,
    stay_for_two_turns: TURNS,
    stay_for_two_turns_now_and_then: TURNS,
    turn_back: TURNS,
    begin_anew_with_each_join: TURNS,
    hold_for_ever: TURNS,
    push_ahead: TURNS,
    move_in_flight: "a decode moved lanes while in flight",
    never_give_away: UNEVEN,
    join_one_lane: UNEVEN,
    decode_all_lanes: OTHER_LANE,
    stop_at_an_empty_lane: "nothing is done for those in the system",
    repeat_the_rows_of_the_lane_before: OTHER_LANE,
}
"""Each bug, and the promise that it is seen to break."""

SEEDS = range(30)
"""Seeds of the walks; the bug that is found last takes 21 of them."""
FOUND_LATE = {push_ahead, move_in_flight, never_give_away}
"""Bugs that walks run into only after half a second and more."""
CASES = [
    pytest.param(
        plant,
        num_stages,
        id=f"{plant.__name__}-{num_stages}",
        marks=[pytest.mark.slow] * (plant in FOUND_LATE),
    )
    for plant in PLANTED
    for num_stages in (2, 4)
    if (plant, num_stages) != (turn_back, 2)  # there and back again is the order of two lanes
]


def is_seen_to_break(promise: str, num_stages: int) -> bool:
    """Return True once a walk breaks this promise; before that walks may break others."""
    for seed in SEEDS:
        try:
            walk_full_lanes([seed], num_events=40, num_stages=num_stages)
        except AssertionError as error:
            if re.search(promise, str(error)):
                return True
    return False


class TestPlantedLaneBugs:
    @pytest.mark.slow
    @pytest.mark.parametrize("num_stages", [2, 4])
    def test_the_walks_find_nothing_where_no_bug_is(self, num_stages):
        """
        Without a bug the same walks keep every promise, so that what they find is the bug.
        """
        walk_full_lanes(SEEDS, num_events=40, num_stages=num_stages)

    @pytest.mark.parametrize(("plant", "num_stages"), CASES)
    def test_the_walks_find_it(self, plant, num_stages, monkeypatch):
        """
        Lanes with this bug break the promise that it is about.
        """
        plant(monkeypatch)
        assert is_seen_to_break(PLANTED[plant], num_stages)
