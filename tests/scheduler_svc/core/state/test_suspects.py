"""Requests blamed for deaths of executors, the trials, and the consequences of each death."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.request.request_parts import Terms
from scheduler_svc.core.state.suspects import BROKEN_AT, CLEARED_AFTER, Mark, Suspects
from tandem.errors import InternalError
from tests.scheduler_svc.core.harness import GREEDY


def request(number: int, request_id: str | None = None) -> Request:
    """Return a request with a prompt of four tokens."""
    new = NewRequest(
        request_id=request_id or f"r{number}", handle=number, prompt=np.arange(4, dtype=np.int32),
        sampling=GREEDY, max_tokens=50, arrival_s=0.0,
    )  # fmt: skip
    return Request(new=new, number=number, terms=Terms(stop_len=54))


class Court:
    """Suspects, and the requests of a system in which nothing else happens."""

    def __init__(self, count: int) -> None:
        self.suspects = Suspects()
        self.live = {number: request(number) for number in range(count)}

    def die(self, *numbers: int, cleared_at: int = 10 + CLEARED_AFTER):
        """Note a death of an executor in a step of these requests; those that it fails leave."""
        rows = [(self.live[number], cleared_at) for number in numbers]
        verdict = self.suspects.note_death(rows, len(self.live))
        failed = [] if verdict.poison is None else [verdict.poison]
        for one in [*failed, *verdict.victims]:
            self.leave(one.number)
        return verdict

    def leave(self, number: int, *, got_on: bool = False) -> None:
        """Remove a request from the system."""
        del self.live[number]
        self.suspects.note_left(number, got_on=got_on)

    def try_next(self) -> list[int]:
        """Begin the next trial; return the numbers of its requests."""
        return [mark.request.number for mark in self.suspects.begin_trial(self.live.values())]

    def get_on(self, *numbers: int, count: int = 10 + CLEARED_AFTER) -> list[int]:
        """Note that these have so many tokens computed; return those that are trusted again."""
        marks = [mark for mark in self.suspects.marks() if mark.request.number in numbers]
        cleared = self.suspects.note_progress((mark, count) for mark in marks)
        return [mark.request.number for mark in cleared]

    def marked(self) -> dict[int, tuple[int, int]]:
        """Return the deaths and the deaths alone that count against each request."""
        marks = self.suspects.marks()
        return {mark.request.number: (mark.deaths, mark.deaths_alone) for mark in marks}


class TestLateProof:
    def test_death_under_others_does_not_clear_who_is_not_tried(self):
        """
        A death that is proven during a trial it did not happen in leaves the other suspects alone.
        """
        court = Court(4)
        for _ in range(2):
            court.die(0, 1, 2, 3)
        assert [0, 1] == court.try_next()
        court.die(2)
        assert {0: (2, 0), 1: (2, 0), 2: (3, 1), 3: (2, 0)} == court.marked()
        assert [0, 1] == court.try_next()


class TestBlame:
    def test_one_death_makes_nobody_a_suspect(self):
        """
        The requests of one death are watched, and nothing is held up.
        """
        court = Court(4)
        court.die(0, 1)
        assert {0: (1, 0), 1: (1, 0)} == court.marked()
        assert 0 == court.suspects.num_suspects
        assert court.suspects.has_marks

    def test_only_the_step_that_died_counts(self):
        """
        Two deaths make suspects only of requests that were in both steps.
        """
        court = Court(4)
        court.die(0, 1, 2)
        court.die(1, 2, 3)
        assert 2 == court.suspects.num_suspects
        assert {0: (1, 0), 1: (2, 0), 2: (2, 0), 3: (1, 0)} == court.marked()

    @pytest.mark.parametrize(("count", "cleared"), [(17, []), (18, [0]), (400, [0])])
    def test_who_gets_on_is_trusted_as_before(self, count, cleared):
        """
        A request that has as many tokens computed as clear it has no mark any more.
        """
        court = Court(2)
        court.die(0, 1)
        assert cleared == court.get_on(0, count=count)
        assert (0 not in court.marked()) == bool(cleared)

    def test_the_furthest_death_is_to_be_passed(self):
        """
        A later death at an earlier token does not make the first one forgotten sooner.
        """
        court = Court(2)
        court.die(0, 1, cleared_at=108)
        court.die(0)
        assert [] == court.get_on(0, count=107)
        assert [0] == court.get_on(0, count=108)

    def test_a_death_without_requests_blames_nobody(self):
        """
        A step of which all requests ended meanwhile, or a command, blames no request.
        """
        court = Court(2)
        court.die()
        assert not court.suspects.has_marks
        assert {} == court.marked()

    def test_who_leaves_is_forgotten(self):
        """
        An end of whatever kind removes the mark of its request.
        """
        court = Court(3)
        court.die(0, 1)
        court.die(0, 1)
        court.leave(0)
        court.leave(1, got_on=True)
        assert (0, {}) == (court.suspects.num_suspects, court.marked())


class TestBisection:
    @pytest.mark.parametrize("count", [2, 3, 7, 16, 64, 100])
    @pytest.mark.parametrize("place", [0.0, 0.5, 0.99])
    def test_one_killer_of_many_is_found(self, count, place):
        """
        A request that kills every step it is in is found after about log2(n) + 4 deaths, wherever
        it stands, and no other fails.
        """
        court, killer = Court(count + 1), int(place * count)
        court.die(*range(count))
        court.die(*range(count))
        num_deaths, poison = 2, None
        while poison is None:
            tried = court.try_next()
            if killer in tried:
                num_deaths += 1
                poison = court.die(*tried).poison
            else:
                court.get_on(*tried)
        assert killer == poison.number
        assert num_deaths <= 4 + np.ceil(np.log2(count))
        assert 0 == court.suspects.num_suspects

    def test_halves_are_tried_in_order_of_arrival(self):
        """
        The first half of the suspects goes first, the larger one of an odd number.
        """
        court = Court(5)
        court.die(*range(5))
        court.die(*range(5))
        assert [0, 1, 2] == court.try_next()
        assert [0, 1, 2] == list(court.suspects.trial)

    def test_who_passes_is_free_and_the_rest_is_halved(self):
        """
        A trial that is passed leaves the others to be tried.
        """
        court = Court(8)
        court.die(*range(8))
        court.die(*range(8))
        assert [0, 1, 2, 3] == court.try_next()
        assert [0, 1, 2] == court.get_on(0, 1, 2)
        assert [3] == list(court.suspects.trial)
        assert [3] == court.get_on(3)
        assert (4, {}) == (court.suspects.num_suspects, court.suspects.trial)
        assert [4, 5] == court.try_next()

    def test_a_death_narrows_to_its_step(self):
        """
        A suspect that was not in the step of the trial that died has one death left against it, and
        one more makes it a suspect again.
        """
        court = Court(8)
        court.die(*range(8))
        court.die(*range(8))
        court.try_next()
        court.die(0, 1)
        assert {0: (3, 0), 1: (3, 0)} == {n: m for n, m in court.marked().items() if n < 2}
        assert {(1, 0)} == {mark for number, mark in court.marked().items() if number >= 2}
        assert 2 == court.suspects.num_suspects
        assert [0] == court.try_next()

    @pytest.mark.parametrize("killers", [{0, 1}, {0, 15}, {3, 7, 11}, {1, 2, 3, 4, 5}])
    def test_several_killers_are_found_one_by_one(self, killers):
        """
        Each of several requests that kill fails, and no other.
        """
        court, found = Court(16), set[int]()
        for _ in range(200):
            if court.suspects.num_suspects:
                tried = court.suspects.trial or court.try_next()
            else:
                tried = list(court.live)
            if killers.intersection(tried):
                verdict = court.die(*tried)
                assert not verdict.victims
                found |= set() if verdict.poison is None else {verdict.poison.number}
            else:
                court.get_on(*tried)
        assert killers == found
        assert 16 - len(killers) == len(court.live)


class TestAlone:
    def test_a_request_alone_in_the_system_is_poison_at_its_second_death(self):
        """
        Two deaths alone are enough where no other request is there to be a control.
        """
        court = Court(1)
        assert court.die(0).poison is None
        assert 0 == court.die(0).poison.number

    def test_progress_between_two_deaths_alone_forgives_the_first(self):
        """
        A request that gets on between two deaths alone has died alone once.
        """
        court = Court(1)
        court.die(0)
        court.get_on(0)
        assert court.die(0).poison is None

    def test_somebody_else_is_tried_in_between(self):
        """
        Another request runs alone after a death alone, to see whether the executor lives at all.
        """
        court = Court(3)
        court.die(0)
        court.die(0)
        assert {0: (2, 1)} == court.marked()
        assert [1] == court.try_next()
        assert [1] == court.get_on(1)
        assert [0] == court.try_next()
        assert 0 == court.die(0).poison.number

    @pytest.mark.parametrize("reason", ["ended", "went away"])
    def test_a_control_that_ends_well_is_one(self, reason):
        """
        A control that ends by what it produced has got on; one that leaves otherwise has not.
        """
        court = Court(4)
        court.die(0)
        court.die(0)
        assert [1] == court.try_next()
        court.leave(1, got_on=reason == "ended")
        assert [0 if reason == "ended" else 2] == court.try_next()

    def test_a_second_death_alone_without_control_does_not_count(self):
        """
        Deaths alone in a row count once while another request could be a control.
        """
        court = Court(2)
        for _ in range(3):
            assert court.die(0).poison is None
        assert (3, 1) == court.marked()[0]

    def test_a_control_that_dies_too_is_watched_and_the_next_one_is_tried(self):
        """
        Another control is chosen when one dies, and the one that died is no suspect for the deaths
        of others.
        """
        court = Court(4)
        court.die(0)
        court.die(0)
        assert [1] == court.try_next()
        court.die(1)
        assert {0: (2, 1), 1: (1, 1)} == court.marked()
        assert [2] == court.try_next()

    def test_who_is_least_suspicious_and_soon_computed_is_the_control(self):
        """
        A control has no deaths, is no choice of a request that died, has outputs and few tokens, if
        there is such a request.
        """
        court = Court(4)
        court.live[4] = request(4, "r0")
        court.live[2].outputs.extend([1, 2, 3])
        court.live[3].outputs.extend([1])
        court.die(0, 3)
        court.die(0)
        court.die(0)
        assert [2] == court.try_next()
        court.leave(2)
        assert [1] == court.try_next()
        court.leave(1)
        assert [4] == court.try_next()

    def test_a_control_has_to_get_on_from_where_it_stands(self):
        """
        A control is done when eight tokens more than now known are computed.
        """
        court = Court(2)
        court.live[1].outputs.extend([1, 2, 3])
        court.die(0)
        court.die(0)
        court.try_next()
        assert [] == court.get_on(1, count=6 + CLEARED_AFTER - 1)
        assert [1] == court.get_on(1, count=6 + CLEARED_AFTER)

    def test_a_control_without_a_suspect_left_is_over(self):
        """
        No request is tried any more once the last suspect leaves.
        """
        court = Court(3)
        court.die(0)
        court.die(0)
        court.try_next()
        court.leave(0)
        assert (0, {}) == (court.suspects.num_suspects, court.suspects.trial)


class TestBrokenExecutor:
    def test_an_executor_that_always_dies_is_to_blame_itself(self):
        """
        Requests that died alone one after the other while no other got on fail as the loss of an
        executor once there are BROKEN_AT of them, none as poison.
        """
        court = Court(10)
        court.die(*range(10))
        court.die(*range(10))
        verdict, num_deaths = None, 2
        while verdict is None or not verdict.victims:
            verdict, num_deaths = court.die(*court.try_next()), num_deaths + 1
            assert verdict.poison is None
        assert BROKEN_AT == len(verdict.victims)
        assert 2 + 4 + BROKEN_AT - 1 == num_deaths
        assert 6 == len(court.live)

    def test_few_requests_fail_as_poison_at_last(self):
        """
        Each request dies alone twice before it fails where fewer than BROKEN_AT are in the system.
        """
        court, num_deaths, order = Court(3), 0, []
        while court.live:
            trial = court.try_next() if court.suspects.num_suspects else list(court.live)
            verdict, num_deaths = court.die(*trial), num_deaths + 1
            order += [] if verdict.poison is None else [verdict.poison.number]
        assert [0, 1, 2] == sorted(order)
        assert num_deaths >= 2 * 3

    def test_one_that_gets_on_starts_the_count_anew(self):
        """
        Deaths alone before another request got on say nothing against the executor.
        """
        court = Court(12)
        court.die(0)
        court.die(0)
        for _ in range(2):
            court.die(*court.try_next())
        court.get_on(*court.try_next())
        assert [0] == court.try_next()
        assert 0 == court.die(0).poison.number


class TestIntegrity:
    def suspected(self) -> Court:
        """Return a court of four requests of which two are suspects and one of these is tried."""
        court = Court(4)
        court.die(0, 1)
        court.die(0, 1)
        court.try_next()
        court.suspects.check_integrity(court.live.keys())
        return court

    def test_a_mark_of_a_request_that_left_is_noticed(self):
        """
        A mark that outlives its request fails the check.
        """
        court = self.suspected()
        del court.live[0]
        with pytest.raises(InternalError, match="left is still suspected"):
            court.suspects.check_integrity(court.live.keys())

    def test_a_trial_of_an_unmarked_request_is_noticed(self):
        """
        A request that is tried though no death counts against it fails the check.
        """
        court = self.suspected()
        court.suspects.trial[3] = Mark(request=court.live[3])
        with pytest.raises(InternalError, match="tried that nothing speaks against"):
            court.suspects.check_integrity(court.live.keys())

    @pytest.mark.parametrize("error", [-1, 1])
    def test_a_wrong_count_of_suspects_is_noticed(self, error):
        """
        A count of suspects that is not the number of requests with two deaths fails the check.
        """
        court = self.suspected()
        court.suspects.num_suspects += error
        with pytest.raises(InternalError, match="miscounted"):
            court.suspects.check_integrity(court.live.keys())

    def test_a_trial_without_suspects_is_noticed(self):
        """
        A trial that goes on after its last suspect was cleared fails the check: only its requests
        would ever run.
        """
        court = Court(2)
        court.die(0, 1)
        court.suspects.trial = {mark.request.number: mark for mark in court.suspects.marks()}
        with pytest.raises(InternalError, match="without suspects"):
            court.suspects.check_integrity(court.live.keys())
