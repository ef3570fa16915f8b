"""A request's parts change by its own verbs, and say what was noted."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.request.request_parts import Place, PrefixUse, Setbacks, Terms, Times
from tests.scheduler_svc.core.harness import GREEDY


def request(number: int = 0, **changes) -> Request:
    """Return a request with a prompt of four tokens that ends at 24."""
    new = NewRequest(
        request_id="r0", handle=100 + number, prompt=np.arange(4, dtype=np.int32),
        sampling=GREEDY, max_tokens=20, arrival_s=0.0, **changes,
    )  # fmt: skip
    return Request(new=new, number=number, terms=Terms(stop_len=24))


class TestTerms:
    def test_a_request_comes_with_no_output_and_its_whole_prompt(self):
        """
        Unless more is said, no output token is known, none was cut and none is queued.
        """
        terms = Terms(stop_len=24)
        assert (0, 0, 0) == (terms.num_prior, terms.num_truncated_tokens, terms.queued_tokens)

    @pytest.mark.parametrize(("num_tokens", "expected"), [(-1, 1), (0, 1), (1, 1), (7, 7)])
    def test_at_least_one_token_is_queued(self, num_tokens, expected):
        """
        A request whose prompt is cached whole still counts one token to compute.
        """
        terms = Terms(stop_len=24)
        terms.note_queued(num_tokens)
        assert expected == terms.queued_tokens

    @pytest.mark.parametrize(("longest", "expected"), [(23, 23), (24, 24), (25, 24)])
    def test_a_shorter_context_ends_it_earlier(self, longest, expected):
        """
        A request ends where the context does, and no later than it did before.
        """
        terms = Terms(stop_len=24)
        terms.shorten(longest)
        assert expected == terms.stop_len


class TestPlace:
    def test_key_and_counters_outlast_the_slot(self):
        """
        A request takes along the key of its results and what is in flight of it.
        """
        place = Place()
        place.enter(3, 7)
        assert (3, (3, 7)) == (place.slot, place.key)
        place.leave(14, 12)
        assert (None, (3, 7), 14, 12) == (place.slot, place.key, place.planned, place.applied)
        assert 2 == place.num_in_flight
        place.note_applied(1)
        assert (13, 1) == (place.applied, place.num_in_flight)


class TestTimes:
    def test_first_and_latest_token_are_noted_apart(self):
        """
        Either time changes without the other.
        """
        times = Times()
        times.note_first_token(1.5)
        assert (1.5, None) == (times.first_token_s, times.last_token_s)
        times.note_token(2.5)
        assert (1.5, 2.5) == (times.first_token_s, times.last_token_s)


class TestPrefixUse:
    def test_digests_are_added_behind_those_that_are_known(self):
        """
        Digests stand in the order of the blocks.
        """
        prefix = PrefixUse()
        prefix.add_digests([b"a", b"b"])
        prefix.add_digests([b"c"])
        assert [b"a", b"b", b"c"] == prefix.digests

    def test_a_request_that_shared_may_share_again_unless_it_is_to_be_alone(self):
        """
        Writers are forgotten with the KV; only wrong KV makes a request compute everything itself.
        """
        prefix = PrefixUse()
        prefix.share(frozenset({5}))
        assert frozenset({5}) == prefix.writers
        prefix.forget_writers()
        assert (frozenset(), False) == (prefix.writers, prefix.is_alone)
        prefix.share(frozenset({6}))
        prefix.share_nothing()
        assert (frozenset(), True) == (prefix.writers, prefix.is_alone)


class TestSetbacks:
    def test_each_setback_is_counted_for_itself(self):
        """
        Preemptions and steps without memory are counted; a priority preemption is noted.
        """
        setbacks = Setbacks()
        setbacks.note_preemption()
        setbacks.note_preemption()
        setbacks.note_out_of_memory()
        assert (2, 1, False) == (
            setbacks.num_preemptions,
            setbacks.num_out_of_memory,
            setbacks.gave_way,
        )
        setbacks.give_way()
        assert setbacks.gave_way


class TestRequest:
    def test_choices_share_one_list_of_siblings(self):
        """
        A choice that is added later is known to those that joined before.
        """
        first, second = request(0), request(1)
        choices = [first]
        first.join(choices)
        choices.append(second)
        second.join(choices)
        assert first.siblings is second.siblings is choices
        assert [first, second] == first.siblings

    def test_only_the_first_admission_counts(self):
        """
        Later admissions change neither the time in the queue nor the cached tokens that are told.
        """
        one = request()
        one.note_scheduled(1.0, 3)
        one.note_scheduled(2.0, 4)
        assert (1.0, 3) == (one.times.scheduled_s, one.prefix.num_cached_tokens)

    def test_cached_outputs_are_no_cached_prompt(self):
        """
        At most the prompt is told as cached, though its outputs may be too.
        """
        one = request()
        one.note_scheduled(1.0, 9)
        assert 4 == one.prefix.num_cached_tokens

    def test_the_end_of_a_wait_tells_its_length_and_rank(self):
        """
        An admission notes how long the request has waited in all and whether that put it ahead.
        """
        one = request()
        one.end_wait(2.5, was_aged=True)
        assert (2.5, True) == (one.times.waited_s, one.setbacks.was_aged)
        one.end_wait(3.5, was_aged=False)
        assert (3.5, False) == (one.times.waited_s, one.setbacks.was_aged)

    def test_outputs_are_appended_one_by_one_or_as_a_column(self):
        """
        Tokens stand in the order in which they came, however they came.
        """
        one = request()
        one.append_output(5)
        one.append_column(np.array([6, 7], np.int32).data.cast("B"))
        assert [5, 6, 7] == one.outputs.tolist()
        assert [0, 1, 2, 3, 5, 6, 7] == one.known_tokens().tolist()

    def test_digests_that_came_with_it_are_forgotten_too(self):
        """
        Digests of blocks of another size are of no use, be they computed here or by a frontend.
        """
        one = request(block_digests=b"d" * 32)
        one.prefix.add_digests([b"d" * 32])
        one.forget_digests()
        assert ([], b"") == (one.prefix.digests, one.new.block_digests)
