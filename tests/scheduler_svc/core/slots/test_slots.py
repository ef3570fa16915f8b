"""Slots: the decodes chosen when a step has no room for all, and columns written at admission."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.core.request.geometry import Limits
from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.request.request_parts import Terms
from scheduler_svc.core.slots.planned_rows import PlannedRows
from scheduler_svc.core.slots.slots import SlotTable
from tests.scheduler_svc.core.harness import GREEDY, geometry_of, small_config


def request(number: int, prompt_len: int = 4, **changes) -> Request:
    """Return a request whose handle is 100 more than its number."""
    new = NewRequest(
        request_id=f"r{number}", handle=100 + number, prompt=np.arange(prompt_len, dtype=np.int32),
        sampling=GREEDY, max_tokens=20, arrival_s=0.0, **changes,
    )  # fmt: skip
    return Request(new=new, number=number, terms=Terms(stop_len=prompt_len + 20))


def table() -> SlotTable:
    """Return eight free slots."""
    config = small_config(max_batch_size=8)
    return SlotTable(Limits.of(config, geometry_of(config)))


def occupy(slots: SlotTable, *requests: Request) -> np.ndarray:
    """Give each request a slot with a block of its own; return the slots in the same order."""
    blocks = np.arange(1, len(requests) + 1, dtype=np.int32)
    occupied = [
        slots.occupy(one, blocks[i : i + 1], max_blocks=6) for i, one in enumerate(requests)
    ]
    return np.array(occupied)


class TestLeastServed:
    def test_the_oldest_are_served_first(self):
        """
        Requests that all had as many turns are served in the order of their arrival.
        """
        slots = table()
        third, first, second = occupy(slots, request(9), request(2), request(5))
        ready = np.sort([third, first, second])
        assert [first, second] == slots.least_served(ready, 2).tolist()

    def test_requests_left_out_go_first_next_time(self):
        """
        Five requests get two places in turn, and none gets its second before all had their first.
        """
        slots = table()
        ready = occupy(slots, *(request(number) for number in range(5)))
        chosen = [slots.least_served(np.sort(ready), 2).tolist() for _ in range(5)]
        served = [slot for pair in chosen for slot in pair]
        assert ready.tolist() * 2 == served

    def test_a_new_request_is_served_before_those_that_had_a_turn(self):
        """
        A request that gets a slot has waited longest for a token, whatever its slot's last request
        had.
        """
        slots = table()
        first, second = occupy(slots, request(0), request(1))
        slots.least_served(np.array([first, second]), 1)
        slots.vacate(int(first))
        slots.forget(int(first))
        (third,) = occupy(slots, request(2))
        assert first == third
        slots.least_served(np.array([first, second]), 1)
        assert [third] == slots.least_served(np.array([first, second]), 1).tolist()

    def test_requests_that_are_not_ready_keep_their_turn(self):
        """
        A request that is not asked about is served as soon as it is.
        """
        slots = table()
        a, b, c = occupy(slots, request(0), request(1), request(2))
        slots.least_served(np.array([b, c]), 1)
        assert [a, c] == slots.least_served(np.sort([a, b, c]), 2).tolist()


class TestPlannedRows:
    def test_a_command_has_no_rows(self):
        """
        The rows kept of a command that was sent are none: it decodes nothing and ends no output.
        """
        rows = PlannedRows.none(3)
        columns = (rows.slot, rows.generation, rows.num_tokens, rows.sampling_slot)
        assert [0, 0, 0, 0] == [len(column) for column in columns]
        assert (0, None, 3, False) == (
            rows.num_decodes, rows.decodes, rows.num_departures, rows.has_last_decode,
        )  # fmt: skip


class TestAdmittedColumns:
    def test_a_row_says_what_the_request_is(self):
        """
        Admission writes lengths, handle and number of a request, and the most blocks it can need.
        """
        slots, one = table(), request(3, prompt_len=6)
        one.outputs.extend([7, 8, 9])
        one.terms.num_prior = 2
        (slot,) = occupy(slots, one)
        admitted = slots.admitted
        assert (9, 6, 8) == (
            admitted.known_len[slot], admitted.prompt_len[slot], admitted.submitted_len[slot],
        )  # fmt: skip
        assert (26, 6) == (admitted.stop_len[slot], admitted.max_blocks[slot])
        assert (103, 3) == (admitted.handle[slot], admitted.number[slot])

    def test_turns_count_admissions_over_all_slots(self):
        """
        A later admission has a later turn, in whatever slot.
        """
        slots = table()
        occupied = occupy(slots, request(5), request(1), request(3))
        assert [1, 2, 3] == slots.admitted.turn[occupied].tolist()

    @pytest.mark.parametrize("ids", ["eos_token_ids", "stop_token_ids"])
    def test_a_row_stays_readable_without_its_end_ids(self, ids):
        """
        A token ends no running request any more once the request that it would end lost its slot,
        and the other columns stay.
        """
        slots = table()
        (slot,) = occupy(slots, request(3, **{ids: frozenset({5})}))
        tokens = np.array([4, 5], np.int32)
        assert [False, True] == slots.admitted.end_ids.may_end(tokens).tolist()
        slots.vacate(int(slot))
        assert [False, False] == slots.admitted.end_ids.may_end(tokens).tolist()
        assert 103 == slots.admitted.handle[slot]
