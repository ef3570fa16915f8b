"""Whether and when a failed call is tried again."""

from __future__ import annotations

import pytest

from tandem.errors import (
    Draining,
    DuplicateRequestId,
    InternalError,
    InvalidParameter,
    QueueFull,
)
from tandem.inference.v1 import inference_service_pb2 as inference
from tandem.status import CallCancelled, PeerUnavailable
from tandem_client.request import build_request
from tandem_client.resume import ResumableStream
from tandem_client.retry import NO_RETRY, RetryPolicy
from tests.clients.python.fake_server import Act, started


class TestRetryPolicy:
    def test_advice_of_the_server_is_followed(self):
        """
        The wait is what RetryInfo says, whichever try it is.
        """
        policy = RetryPolicy(max_attempts=9)

        assert [3.0, 3.0] == [
            policy.delay_s(QueueFull("", retry_after_s=3.0), n, 0.0) for n in (1, 5)
        ]

    def test_wait_without_advice_doubles(self):
        """
        An unreachable server is tried after delays that double up to the longest.
        """
        policy = RetryPolicy(max_attempts=9, initial_delay_s=0.5, max_delay_s=3.0)
        delays = [policy.delay_s(PeerUnavailable(""), n, 0.0) for n in (1, 2, 3, 4)]

        assert [0.5, 1.0, 2.0, 3.0] == delays

    def test_jitter_lengthens_by_at_most_a_quarter(self):
        """
        Jitter spreads clients over a quarter of the wait, and never passes the longest.
        """
        policy = RetryPolicy(max_delay_s=4.5)

        assert 1.125 == policy.delay_s(QueueFull("", retry_after_s=1.0), 1, 0.5)
        assert 4.5 == policy.delay_s(QueueFull("", retry_after_s=4.0), 1, 0.99)

    @pytest.mark.parametrize(
        "error",
        [InvalidParameter(""), InternalError(""), CallCancelled("")],
        ids=lambda e: e.reason,
    )
    def test_final_failures_are_final(self, error):
        """
        What a repetition cannot change is not tried again.
        """
        assert RetryPolicy().delay_s(error, 1, 0.0) is None

    def test_last_attempt_is_final(self):
        """
        A policy of n attempts allows n - 1 repetitions; NO_RETRY none.
        """
        policy = RetryPolicy(max_attempts=3)
        verdicts = [policy.delay_s(Draining(""), n, 0.0) is None for n in (1, 2, 3)]

        assert [False, False, True] == verdicts
        assert NO_RETRY.delay_s(Draining(""), 1, 0.0) is None


class TestResumableStream:
    def test_time_limit_shrinks_by_what_has_passed(self):
        """
        The time limit counts from the first call: a repetition sends what is left of it.
        """
        request = build_request("hi", {"time_limit_s": 10.0})
        stream = ResumableStream(request, RetryPolicy(), now=100.0)
        delay = stream.on_failure(Draining("", retry_after_s=1.0), now=103.0, jitter=0.0)

        assert 1.0 == delay
        assert 6000 == stream.request.time_limit_ms
        assert 10_000 == request.time_limit_ms

    def test_own_id_may_still_be_live_after_a_break(self):
        """
        DuplicateRequestId is waited out when the duplicate can only be the broken call itself.
        """
        request = build_request("hi", {"request_id": "mine"})
        fresh = ResumableStream(request, RetryPolicy(), now=0.0)
        with pytest.raises(DuplicateRequestId):
            fresh.on_failure(DuplicateRequestId("live"), now=0.0, jitter=0.0)

        broken = ResumableStream(request, RetryPolicy(), now=0.0)
        broken.accept(inference.GenerateResponse(started=started(request, Act())))
        assert 0.2 == broken.on_failure(PeerUnavailable(""), now=0.0, jitter=0.0)
        assert 1.0 == broken.on_failure(DuplicateRequestId("live"), now=1.0, jitter=0.0)
