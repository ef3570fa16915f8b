"""Live requests: found by handle and id, in order of acceptance and of deadline, until they end."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.request.request_parts import Terms
from scheduler_svc.core.state.live_requests import LiveRequests
from tandem.errors import InternalError, RequestNotFound
from tests.scheduler_svc.core.harness import GREEDY


def choice(number: int, request_id: str | None = None, **changes) -> Request:
    """Return one choice of a request, with its number as its handle."""
    new = NewRequest(
        request_id=request_id or f"r{number}", handle=number, prompt=np.arange(4, dtype=np.int32),
        sampling=GREEDY, max_tokens=50, arrival_s=0.0, **changes,
    )  # fmt: skip
    return Request(new=new, number=number, terms=Terms(stop_len=54))


def live(*choices: Request) -> LiveRequests:
    """Return live requests to which these choices were added in this order."""
    requests = LiveRequests()
    for one in choices:
        requests.add(one)
    return requests


class TestLookup:
    def test_choices_are_listed_in_order_of_acceptance(self):
        """
        Choices are counted, and come in the order in which they were added.
        """
        choices = [choice(2), choice(0), choice(1)]
        requests = live(*choices)
        assert 3 == len(requests)
        assert choices == list(requests)

    def test_a_choice_is_found_by_its_handle_until_it_ends(self):
        """
        A handle finds its choice while that is live, and nothing afterwards.
        """
        one = choice(5)
        requests = live(one, choice(6))
        assert one is requests.find(5)
        requests.remove(one)
        assert requests.find(5) is None

    def test_a_request_is_live_until_its_last_choice_ends(self):
        """
        A request id is known while any choice of the request is live.
        """
        first, second = choice(0, "r"), choice(1, "r")
        requests = live(first, second)
        requests.remove(first)
        assert requests.has("", "r")
        requests.remove(second)
        assert not requests.has("", "r")

    def test_choices_know_their_siblings(self):
        """
        All choices of a request share one list of those that are live, in order.
        """
        first, second, other = choice(0, "r"), choice(1, "r"), choice(2)
        requests = live(first, second, other)
        assert [first, second] == first.siblings
        assert first.siblings is second.siblings
        requests.remove(first)
        assert [second] == second.siblings
        assert [other] == other.siblings

    def test_tenants_have_ids_of_their_own(self):
        """
        Two tenants' requests with one id are two requests, and each ends by itself.
        """
        red, blue = choice(0, "r", tenant="red"), choice(1, "r", tenant="blue")
        requests = live(red, blue)
        assert [red] == red.siblings == requests.choices_of("red", "r")
        assert [blue] == requests.choices_of("blue", "r")
        requests.check_integrity()
        requests.remove(red)
        assert (False, True) == (requests.has("red", "r"), requests.has("blue", "r"))
        requests.check_integrity()

    def test_the_list_of_choices_is_the_caller_s(self):
        """
        The list of a request's choices stays as it is while these choices end.
        """
        choices = [choice(0, "r"), choice(1, "r")]
        requests = live(*choices)
        for one in (listed := requests.choices_of("", "r")):
            requests.remove(one)
        assert choices == listed

    def test_an_unknown_id_is_not_found(self):
        """
        Asking for the choices of a request that has ended fails with the field that names it.
        """
        one = choice(0)
        requests = live(one)
        requests.remove(one)
        with pytest.raises(RequestNotFound, match="r0") as error:
            requests.choices_of("", "r0")
        assert "request_id" == error.value.field


class TestDeadlines:
    def test_the_earliest_deadline_is_next(self):
        """
        The next deadline is the earliest of the live choices, and there is none without any.
        """
        soon = choice(1, deadline_s=2.0)
        requests = live(choice(0), choice(2, deadline_s=3.0), soon)
        assert 2.0 == requests.next_deadline_s
        requests.remove(soon)
        assert 3.0 == requests.next_deadline_s
        assert live(choice(0)).next_deadline_s is None

    def test_a_deadline_is_over_when_its_time_has_come(self):
        """
        A choice has expired at its deadline, and not before.
        """
        soon = choice(1, deadline_s=2.0)
        requests = live(choice(0, deadline_s=3.0), soon)
        assert requests.expired(1.9) is None
        assert soon is requests.expired(2.0)
        requests.remove(soon)
        assert requests.expired(2.0) is None

    def test_a_deadline_of_zero_is_one(self):
        """
        A deadline at time zero is a deadline like any other.
        """
        requests = live(choice(0, deadline_s=0.0))
        assert 0.0 == requests.next_deadline_s
        assert requests.find(0) is requests.expired(0.0)


class TestTenants:
    def test_live_choices_count_for_their_tenant(self):
        """
        A tenant has as many requests as choices of its requests are live.
        """
        first = choice(0, "r", tenant="blue")
        requests = live(first, choice(1, "r", tenant="blue"), choice(2, tenant="red"))
        assert (2, 1) == (requests.tenants.count("blue"), requests.tenants.count("red"))
        requests.remove(first)
        assert 1 == requests.tenants.count("blue")


class TestIntegrity:
    def test_indexes_that_agree_pass(self):
        """
        Live requests with choices and tenants pass the check, also after some of them ended.
        """
        first = choice(0, "r", tenant="blue")
        requests = live(first, choice(1, "r", tenant="blue"), choice(2))
        requests.check_integrity()
        requests.remove(first)
        requests.check_integrity()

    def test_a_lost_handle_is_noticed(self):
        """
        A choice that only its request's id finds fails the check.
        """
        requests = live(choice(0), choice(1))
        del requests._by_handle[1]
        with pytest.raises(InternalError, match="not of the same requests"):
            requests.check_integrity()

    def test_a_choice_with_siblings_of_its_own_is_noticed(self):
        """
        A choice whose list of siblings is a copy fails the check: it would miss later ends.
        """
        requests = live(choice(0, "r"), choice(1, "r"))
        requests.find(1).siblings = [*requests.find(1).siblings]
        with pytest.raises(InternalError, match="does not know its siblings"):
            requests.check_integrity()

    def test_a_wrong_count_of_a_tenant_is_noticed(self):
        """
        A tenant with more choices counted than are live fails the check.
        """
        requests = live(choice(0, tenant="blue"))
        requests.tenants.add("blue")
        with pytest.raises(InternalError, match="blue"):
            requests.check_integrity()


class TestNumbers:
    def test_next_number_follows_all_that_were_given(self):
        """
        A number is given once: ends of requests, the newest one too, give none back.
        """
        requests = LiveRequests()
        assert 0 == requests.next_number
        one = choice(requests.next_number)
        requests.add(one)
        requests.remove(one)
        assert 1 == requests.next_number

    def test_number_that_is_yet_to_be_given_is_found(self):
        """
        The check finds a request that has the number of one to come.
        """
        requests = live(choice(0), choice(1))
        requests.check_integrity()
        requests.next_number = 1
        with pytest.raises(InternalError, match="yet to be accepted"):
            requests.check_integrity()
