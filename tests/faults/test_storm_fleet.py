"""One of four executors that serve together is lost, again and again, while 64 streams run."""

from __future__ import annotations

import pytest

from tests.faults.conftest import TIMES
from tests.faults.schedule import Kind

TOGETHER = {"num_executors": 4, "num_together": 4}


@pytest.mark.slow
@pytest.mark.timeout(900)
class TestFleetStorms:
    def test_random_executor_is_killed_whenever_two_others_serve(self, storm):
        """
        No stream fails and no token differs in ten kills for each time of other faults, and the
        readiness of the service never turns off.
        """
        storm([Kind.ONE_KILLED], times=10 * TIMES, **TOGETHER)

    def test_executors_are_stopped_and_told_to_stop(self, storm):
        """
        Streams of an executor that is silent for `move_after_s`, or that ends in an orderly way, go
        on at the others.
        """
        storm(
            [Kind.ONE_STOPPED, Kind.ONE_TOLD_TO_STOP], scheduler=("--move-after-s=1",), **TOGETHER
        )

    def test_executors_are_replaced_join_and_leave(self, storm):
        """
        Operators drain, replace, remove and add executors under load, and no stream notices.
        """
        storm([Kind.ONE_DRAINED, Kind.ONE_REMOVED], **TOGETHER)

    def test_request_that_kills_executors_fails_alone(self, storm):
        """
        A request that kills whichever executor computes it fails as such, however many could take
        it next, and no other request fails with it.
        """
        storm([Kind.POISON], times=1, **TOGETHER)
