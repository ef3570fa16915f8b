"""
One stream across several calls: the output delivered so far, and the request for the rest.

A server that stops in the middle of a stream keeps no state of it. So the request is sent again
with the parameters it ran with and the ids that were delivered; any server of the same model
continues after them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from tandem.errors import InternalError, ModelChanged, TandemError
from tandem.inference.v1 import inference_service_pb2 as inference
from tandem.inference.v1 import stream_pb2
from tandem_client.events import Delta, Done, Event, Finished, Started, event_from_proto
from tandem_client.params import GenerateOptions
from tandem_client.request import build_request
from tandem_client.streams.retry import RetryPolicy

MAX_RESUMES_IN_VAIN = 16
"""Number of accepted calls in a row without new output after which a stream is given up: the
request itself may be what stops its servers."""
LEAST_TIME_LIMIT_S = 0.001
"""Shortest time limit that a server takes, for a request whose time is over."""


class ResumableStream:
    """
    State of one `Generate` that may take several calls. It does no I/O: the clients feed it
    responses and failures, and send its `request`.
    """

    def __init__(
        self,
        request: inference.GenerateRequest,
        policy: RetryPolicy,
        now: float,
        *,
        attempt_key: str = "",
    ) -> None:
        """
        Args:
            request: Request of the caller.
            policy: Policy of retries and resumption after a failure.
            now: Current time in seconds.
            attempt_key: Key for a request that may be sent more than once and has no key.
        """
        self.request = with_key(request, policy, attempt_key)
        """Request to send in the next call."""
        self.done = False
        self._policy = policy
        self._started_at_s = now
        self._first_output_s: float | None = None
        self._time_limit_s = request.time_limit_s if request.HasField("time_limit_s") else None
        self._has_ids = not request.response.omit_token_ids
        """False: nothing tells where the stream broke, so that it cannot be resumed."""
        self._started: stream_pb2.Started | None = None
        held = request.resume.choices  # of a caller who goes on with an earlier stream
        self._token_ids = {one.choice: list(one.token_ids) for one in held}
        self._finished = {one.choice for one in held if one.finished}
        self._has_output = False
        self._was_resumed = False
        self._num_failures = 0
        self._num_in_vain = 0
        self._broken_since_s: float | None = None

    @property
    def is_accepted(self) -> bool:
        """True after a server accepted the request."""
        return self._started is not None

    @property
    def _cannot_resume(self) -> bool:
        """True after output of which the client has no ids."""
        return not self._has_ids and self._has_output

    def accept(self, response: inference.GenerateResponse | Delta, now: float) -> Event | None:
        """
        Process the next response, or new output that is decoded already; return the event for the
        caller, or None if it has no news.

        Raises:
            ModelChanged: The stream was resumed on a server of another model.
            InternalError: The server does not continue after the output that was delivered.
        """
        if isinstance(response, Delta):
            self._on_delta(response, now)
            return response
        event = event_from_proto(response)
        match event:
            case Delta():
                self._on_delta(event, now)
            case Started():
                return self._on_started(event, response.started)
            case Finished():
                self._finished.add(event.choice)
                self._has_output = True
            case Done():
                self.done = True
                return self._whole(event, now)
        return event

    def on_failure(self, error: TandemError, now: float, jitter: float) -> float:
        """
        Prepare `request` for a new call, and return the seconds to wait before sending it.

        Raises:
            TandemError: The stream cannot go on; this is `error` itself.
        """
        self._num_failures += 1
        delay: float | None
        if self._cannot_resume:
            raise error
        if self._started is None:
            delay = self._policy.delay_s(error, self._num_failures, jitter)
        else:
            if self._broken_since_s is None:
                self._broken_since_s = now
                self._num_in_vain += 1
            broken_s = now - self._broken_since_s
            delay = self._policy.resume_delay_s(error, self._num_failures, broken_s, jitter)
        if delay is None or self._num_in_vain > MAX_RESUMES_IN_VAIN:
            raise error
        self._prepare(now + delay)
        return delay

    def _prepare(self, now: float) -> None:
        request = inference.GenerateRequest()
        request.CopyFrom(self.request)
        if self._started is not None:
            self._was_resumed = True
            request.request_id = self._started.request_id
            request.sampling.CopyFrom(self._started.sampling)
            request.stopping.CopyFrom(self._started.stopping)
            request.resume.Clear()
            request.resume.SetInParent()
            for choice in sorted(self._token_ids.keys() | self._finished):
                request.resume.choices.add(
                    choice=choice,
                    token_ids=self._token_ids.get(choice, ()),
                    finished=choice in self._finished,
                )
        if self._time_limit_s is not None:
            left_s = self._time_limit_s - (now - self._started_at_s)
            request.time_limit_s = max(LEAST_TIME_LIMIT_S, left_s)
        self.request = request

    def _on_started(self, event: Started, message: stream_pb2.Started) -> Started | None:
        self._broken_since_s = None
        is_first = self._started is None
        if self._started is None:
            self._started = message
        if event.model_revision != self._started.model_revision:
            raise ModelChanged(
                "the stream broke and the server now serves another model; send the request again"
            )
        num_sent = sum(len(one.token_ids) for one in self.request.resume.choices)
        if event.resumed_tokens != num_sent:
            raise InternalError(
                f"the request has {num_sent} tokens, but the server goes on after "
                f"{event.resumed_tokens}"
            )
        return event if is_first else None

    def _on_delta(self, event: Delta, now: float) -> None:
        delivered = self._token_ids.setdefault(event.choice, [])
        if self._has_ids and event.first_token_offset != len(delivered):
            raise InternalError(
                f"choice {event.choice} has {len(delivered)} tokens, but the server goes on at "
                f"offset {event.first_token_offset}"
            )
        delivered.extend(event.token_ids)
        self._has_output = True
        self._num_failures = self._num_in_vain = 0
        if self._first_output_s is None:
            self._first_output_s = now

    def _whole(self, done: Done, now: float) -> Done:
        """Return the last event with the timings of all calls instead of the last one's."""
        if not self._was_resumed:
            return done
        first_output_s = (
            self._started_at_s if self._first_output_s is None else self._first_output_s
        )
        timings = replace(
            done.timings,
            time_to_first_token_s=first_output_s - self._started_at_s,
            total_s=now - self._started_at_s,
        )
        return replace(done, timings=timings)


def with_key(
    request: inference.GenerateRequest, policy: RetryPolicy, attempt_key: str
) -> inference.GenerateRequest:
    """Return the request, with this key if it may be sent more than once and has no key."""
    if policy.is_final or not attempt_key or request.HasField("attempt_key"):
        return request
    with_one = inference.GenerateRequest()
    with_one.CopyFrom(request)
    with_one.attempt_key = attempt_key
    return with_one


@contextmanager
def paths_of_request() -> Iterator[None]:
    """
    Begin the field paths of errors of Complete, raised in this block, at the caller's request
    instead of at the message around it.
    """
    try:
        yield
    except TandemError as error:
        if error.field is not None:
            error.field = error.field.removeprefix("request.")
        raise


def complete_request(
    prompt: str | None, options: GenerateOptions, policy: RetryPolicy, attempt_key: str
) -> inference.CompleteRequest:
    """
    Build the message of one whole completion; arguments as in `build_request` and `with_key`.

    Raises:
        TypeError: An option has an unknown name.
        InvalidParameter: A value cannot be sent.
    """
    request = with_key(build_request(prompt, options), policy, attempt_key)
    return inference.CompleteRequest(request=request)
