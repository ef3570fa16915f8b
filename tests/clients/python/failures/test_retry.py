"""Retries of a failed call, and their times."""

from __future__ import annotations

import pytest

from tandem.errors import (
    Draining,
    InternalError,
    InvalidParameter,
    QueueFull,
)
from tandem.inference.v1 import inference_service_pb2 as inference
from tandem.status import CallCancelled, PeerUnavailable
from tandem_client.request import build_request
from tandem_client.streams.resume import ResumableStream
from tandem_client.streams.retry import NO_RETRY, RetryPolicy, UnaryRetries
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
        An error that a repetition cannot change is not tried again.
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


class TestUnaryRetries:
    def test_call_that_broke_off_waits_as_long_as_a_stream(self):
        """
        Tries of a patient call are bounded by time instead of number once its server has stopped.
        """
        policy = RetryPolicy(max_attempts=2, resume_within_s=30.0)
        gone = PeerUnavailable("nothing listens", metadata={"connected": "false"})
        retries = UnaryRetries(policy, is_patient=True)
        failures = [
            (PeerUnavailable("Socket closed"), 0.0),
            (gone, 1.0),
            (gone, 29.0),
            (gone, 31.0),
        ]
        verdicts = [retries.delay_s(error, now, 0.0) is None for error, now in failures]
        assert [False, False, False, True] == verdicts

    @pytest.mark.parametrize(
        ("error", "is_patient", "resume"),
        [
            (PeerUnavailable("nothing listens", metadata={"connected": "false"}), True, True),
            (QueueFull("full"), True, True),
            (PeerUnavailable("Socket closed"), False, True),
            (PeerUnavailable("Socket closed"), True, False),
        ],
        ids=["never there", "refused", "not patient", "never resumed"],
    )
    def test_other_calls_are_tried_as_often_as_the_policy_says(self, error, is_patient, resume):
        """
        A server that was never there, or that refuses, gets max_attempts tries; one that stopped,
        too, where nothing is resumed.
        """
        policy = RetryPolicy(max_attempts=3, resume=resume)
        retries = UnaryRetries(policy, is_patient=is_patient)
        assert [False, False, True] == [
            retries.delay_s(error, now, 0.0) is None for now in (0.0, 1.0, 2.0)
        ]


class TestResumableStream:
    def test_time_limit_shrinks_by_what_has_passed(self):
        """
        The time limit counts from the first call: a repetition sends what is left of it.
        """
        request = build_request("hi", {"time_limit_s": 10.0})
        stream = ResumableStream(request, RetryPolicy(), now=100.0)
        delay = stream.on_failure(Draining("", retry_after_s=1.0), now=103.0, jitter=0.0)

        assert 1.0 == delay
        assert 7.0 - delay == stream.request.time_limit_s
        assert 10.0 == request.time_limit_s

    def test_own_key_is_kept(self):
        """
        A key of the caller's own is sent as it is; a policy that sends nothing twice needs none.
        """
        request = build_request("hi", {"attempt_key": "mine"})
        plain = build_request("hi", {})
        streams = [
            ResumableStream(request, RetryPolicy(), now=0.0, attempt_key="chosen"),
            ResumableStream(plain, RetryPolicy(), now=0.0, attempt_key="chosen"),
            ResumableStream(plain, NO_RETRY, now=0.0, attempt_key="chosen"),
        ]
        assert ["mine", "chosen", ""] == [stream.request.attempt_key for stream in streams]
        assert not plain.HasField("attempt_key")

    def test_server_that_stays_away_is_given_up_in_time(self):
        """
        A broken stream waits for a server as long as the policy says, however many tries that takes, and counts
        anew when one has accepted it.
        """
        request = build_request("hi", {})
        policy = RetryPolicy(max_attempts=2, resume_within_s=30.0)
        stream = ResumableStream(request, policy, now=0.0)
        accepted = inference.GenerateResponse(started=started(request, Act()))
        stream.accept(accepted, now=1.0)
        for now in (100.0, 110.0, 129.0):
            stream.on_failure(PeerUnavailable(""), now=now, jitter=0.0)
        stream.accept(accepted, now=129.5)
        stream.on_failure(PeerUnavailable(""), now=150.0, jitter=0.0)
        with pytest.raises(PeerUnavailable):
            stream.on_failure(PeerUnavailable(""), now=181.0, jitter=0.0)

    def test_final_failure_is_raised_after_a_break_too(self):
        """
        An error that no repetition can help ends a broken stream.
        """
        request = build_request("hi", {})
        stream = ResumableStream(request, RetryPolicy(), now=0.0)
        stream.accept(inference.GenerateResponse(started=started(request, Act())), now=0.0)
        with pytest.raises(InvalidParameter):
            stream.on_failure(InvalidParameter(""), now=1.0, jitter=0.0)

    def test_choices_are_resumed_each_for_itself(self):
        """
        Each choice brings its own ids, and one that has ended says so.
        """
        request = build_request("hi", {"n": 3})
        stream = ResumableStream(request, RetryPolicy(), now=0.0)
        messages = [
            {"started": started(request, Act())},
            {"delta": {"choice": 2, "token_ids": [7, 8], "text": "a"}},
            {"delta": {"choice": 0, "token_ids": [9], "text": "b"}},
            {"finished": {"choice": 2}},
        ]
        for message in messages:
            stream.accept(inference.GenerateResponse(**message), now=0.0)
        stream.on_failure(PeerUnavailable(""), now=1.0, jitter=0.0)
        assert [(0, [9], False), (2, [7, 8], True)] == [
            (one.choice, list(one.token_ids), one.finished) for one in stream.request.resume.choices
        ]

    def test_parameters_are_copied_whole(self):
        """
        A resumption sends sampling and stopping as the server settled on them, fields included that
        the flat view of a client does not have.
        """
        request = build_request("hi", {"temperature": 0.5, "stop": ["a"]})
        stream = ResumableStream(request, RetryPolicy(), now=0.0)
        accepted = started(request, Act())
        accepted.stopping.max_tokens = 57
        accepted.sampling.logit_bias[7] = -1.5
        stream.accept(inference.GenerateResponse(started=accepted), now=0.0)
        stream.on_failure(PeerUnavailable(""), now=1.0, jitter=0.0)
        assert (accepted.sampling, accepted.stopping, accepted.request_id) == (
            stream.request.sampling,
            stream.request.stopping,
            stream.request.request_id,
        )

    @pytest.mark.parametrize(
        "output", [{"delta": {"text": "a"}}, {"finished": {"choice": 0}}], ids=["delta", "end"]
    )
    def test_stream_without_ids_cannot_go_on_after_output(self, output):
        """
        With `omit_token_ids` nothing tells where a stream broke: once output began, a break is
        final; before, it is resumed.
        """
        request = build_request("hi", {"omit_token_ids": True})
        stream = ResumableStream(request, RetryPolicy(), now=0.0)
        accepted = inference.GenerateResponse(started=started(request, Act()))
        stream.accept(accepted, now=0.0)
        stream.on_failure(PeerUnavailable("first"), now=1.0, jitter=0.0)
        stream.accept(accepted, now=2.0)
        stream.accept(inference.GenerateResponse(**output), now=2.0)
        with pytest.raises(PeerUnavailable, match="second"):
            stream.on_failure(PeerUnavailable("second"), now=3.0, jitter=0.0)

    def test_offsets_count_without_ids(self):
        """
        With `omit_token_ids` offsets go on counting, and no id is missed.
        """
        request = build_request("hi", {"omit_token_ids": True})
        stream = ResumableStream(request, RetryPolicy(), now=0.0)
        for offset, text in ((0, "ab"), (2, "c")):
            delta = {"first_token_offset": offset, "text": text}
            event = stream.accept(inference.GenerateResponse(delta=delta), now=0.0)
            assert (offset, (), text) == (event.first_token_offset, event.token_ids, event.text)

    def test_lost_token_is_an_error(self):
        """
        Offsets with a gap or a repetition are never passed on.
        """
        request = build_request("hi", {})
        for offset in (0, 2):
            stream = ResumableStream(request, RetryPolicy(), now=0.0)
            first = {"token_ids": [7], "text": "a"}
            stream.accept(inference.GenerateResponse(delta=first), now=0.0)
            second = {"first_token_offset": offset, "token_ids": [8], "text": "b"}
            with pytest.raises(InternalError, match=f"offset {offset}"):
                stream.accept(inference.GenerateResponse(delta=second), now=0.0)
