"""Requests that wait past their queue limit, or longer than their callers."""

from __future__ import annotations

import pytest

from scheduler_svc.core.request.request import FinishReason
from tandem.errors import QueueFull
from tests.scheduler_svc.core.harness import Rig, small_config


def rig_of_one_slot() -> Rig:
    """Return a rig in which one request runs, for long, and others wait."""
    rig = Rig(small_config(max_batch_size=1))
    rig.submit(prompt_len=4, max_tokens=40)
    rig.step()
    return rig


class TestQueueLimit:
    def test_a_request_that_is_not_admitted_in_time_fails(self):
        """
        It fails QUEUE_FULL with the limit's name at its queue limit, not before.
        """
        rig = rig_of_one_slot()
        handle = rig.submit(queue_limit_s=0.5)
        due_s = rig.now + 0.5
        assert due_s == rig.core.next_deadline_s
        rig.core.expire(due_s - 0.001)
        assert rig.core.find(handle) is not None
        rig.core.expire(due_s)
        rig.collect()
        error = rig.failed[handle].error
        assert ("QUEUE_FULL", "queue_limit_s", "0.5") == (
            error.reason, error.metadata["limit"], error.metadata["value"]
        )  # fmt: skip
        assert error.retry_after_s is not None
        rig.core.check_integrity()

    def test_an_admitted_request_may_take_its_time(self):
        """
        The limit ends with the first admission, also where the request is preempted later.
        """
        rig = Rig()
        handle = rig.submit(max_tokens=20, queue_limit_s=5.0)
        rig.step()
        rig.core.preempt(f"r{handle}")
        rig.now += 100.0
        rig.run()
        assert FinishReason.MAX_TOKENS is rig.ended[handle].reason

    def test_choices_wait_on_once_one_was_admitted(self):
        """
        Where one choice of a request was admitted in time, none fails.
        """
        rig = Rig(small_config(max_batch_size=1))
        rig.submit(num_choices=2, max_tokens=8, queue_limit_s=5.0)
        rig.step()
        rig.now += 100.0
        rig.run()
        assert ({0, 1}, {}) == (set(rig.ended), rig.failed)

    def test_all_choices_fail_together(self):
        """
        Each choice of a request that was not admitted fails.
        """
        rig = rig_of_one_slot()
        handle = rig.submit(num_choices=2, queue_limit_s=0.1)
        rig.now += 1.0
        rig.core.expire(rig.now)
        rig.collect()
        assert {handle, handle + 1} == set(rig.failed)


class TestCallDeadline:
    def test_nothing_is_computed_once_the_caller_is_gone(self):
        """
        A request that still waits at the deadline of its call fails then: a soft end would look
        like an answer to a caller whose clock is late.
        """
        rig = rig_of_one_slot()
        handle = rig.submit(give_up_s=rig.now + 2.0)
        rig.now += 2.0
        rig.core.expire(rig.now)
        rig.collect()
        assert not rig.ended
        assert "deadline" == rig.failed[handle].error.metadata["limit"]

    def test_a_call_that_would_wait_for_much_longer_is_refused(self):
        """
        As fast as requests ended lately, a request whose turn would come long after its call's
        deadline is refused with advice; one with time enough is taken, and so is any where none
        waits.
        """
        rig = Rig(small_config(max_batch_size=1))
        for _ in range(4):
            rig.submit(prompt_len=1, max_tokens=1)
        rig.run()
        advice_s = rig.core._cell.retry_advice.after_ends(4, rig.now)
        assert advice_s is not None
        rig.submit(max_tokens=40, give_up_s=rig.now + 0.001)
        rig.step()
        for _ in range(4):
            rig.submit()
        with pytest.raises(QueueFull) as error:
            rig.submit(give_up_s=rig.now + 0.001)
        assert "deadline" == error.value.metadata["limit"]
        assert error.value.retry_after_s is not None
        rig.submit(give_up_s=rig.now + 1000.0)
