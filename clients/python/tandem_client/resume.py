"""
One stream across several calls: what was delivered, and what to leave out when it comes again.

A server that stopped in the middle keeps nothing, but the same seed gives the same tokens. So the
request is sent again with the parameters it ran with, and the part already delivered is compared
and dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.errors import DuplicateRequestId, ModelChanged, TandemError
from tandem.inference.v1 import inference_service_pb2 as inference
from tandem_client.events import Delta, Done, Event, Finished, Started, event_from_proto
from tandem_client.retry import RetryPolicy


@dataclass(slots=True, eq=False)
class _Output:
    """Output of one choice as one call sent it."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""


class ResumableStream:
    """
    The state of one `Generate` that may take several calls. Owns no I/O: the clients feed it
    responses and failures, and ask what to send.
    """

    def __init__(self, request: inference.GenerateRequest, policy: RetryPolicy, now: float) -> None:
        self.request = request
        """What to send in the next call."""
        self.done = False
        self._policy = policy
        self._started_at_s = now
        self._time_limit_ms = request.time_limit_ms if request.HasField("time_limit_ms") else None
        self._started: Started | None = None
        self._delivered: dict[int, _Output] = {}
        self._replayed: dict[int, _Output] = {}
        self._finished: set[int] = set()
        self._num_failures = 0
        self._cause: TandemError | None = None

    def accept(self, response: inference.GenerateResponse) -> Event | None:
        """
        Take the next response; returns what is new to the caller, if anything.

        Raises:
            ModelChanged: The stream was asked for again and another model answered.
            TandemError: The failure that broke the stream, if the repetition differs from it.
        """
        event = event_from_proto(response)
        match event:
            case Started():
                return self._on_started(event)
            case Delta():
                return self._on_delta(event)
            case Finished():
                if event.choice in self._finished:
                    return None
                self._finished.add(event.choice)
            case Done():
                self.done = True
        return event

    def on_failure(self, error: TandemError, now: float, jitter: float) -> float:
        """
        Seconds to wait before sending `request` in a new call.

        Raises:
            TandemError: `error`, if the stream cannot go on.
        """
        self._num_failures += 1
        repeated = self._started is not None
        if repeated and not self._policy.resume:
            raise error
        if isinstance(error, DuplicateRequestId) and repeated:
            # The server may not have noticed yet that the broken call is gone.
            delay = self._policy.delay_s(_retryable(error), self._num_failures, jitter)
        else:
            delay = self._policy.delay_s(error, self._num_failures, jitter)
        if delay is None:
            raise error
        self._cause = error
        self._replayed = {}
        self._prepare(now + delay)
        return delay

    def _prepare(self, now: float) -> None:
        request = inference.GenerateRequest()
        request.CopyFrom(self.request)
        if self._started is not None:
            params = self._started.params
            request.request_id = self._started.request_id
            request.sampling.temperature = params.temperature
            request.sampling.top_k = params.top_k
            request.sampling.top_p = params.top_p
            request.sampling.seed = params.seed
            request.stopping.max_tokens = params.max_tokens
        if self._time_limit_ms is not None:
            elapsed_ms = round((now - self._started_at_s) * 1000)
            request.time_limit_ms = max(1, self._time_limit_ms - elapsed_ms)
        self.request = request

    def _on_started(self, event: Started) -> Started | None:
        if self._started is None:
            self._started = event
            return event
        if event.model_revision != self._started.model_revision:
            raise ModelChanged(
                "the stream broke and the server now serves another model; send the request again"
            )
        return None

    def _on_delta(self, event: Delta) -> Delta | None:
        delivered = self._delivered.setdefault(event.choice, _Output())
        if self._cause is None:
            delivered.token_ids.extend(event.token_ids)
            delivered.text += event.text
            self._num_failures = 0
            return event
        replayed = self._replayed.setdefault(event.choice, _Output())
        replayed.token_ids.extend(event.token_ids)
        replayed.text += event.text
        known = min(len(replayed.token_ids), len(delivered.token_ids))
        if replayed.token_ids[:known] != delivered.token_ids[:known]:
            raise self._cause
        new_ids = tuple(replayed.token_ids[len(delivered.token_ids) :])
        new_text = replayed.text[len(delivered.text) :]
        if not new_ids and not new_text:
            return None
        offset = len(delivered.token_ids)
        delivered.token_ids.extend(new_ids)
        delivered.text += new_text
        self._num_failures = 0
        return Delta(
            choice=event.choice, first_token_offset=offset, token_ids=new_ids, text=new_text
        )


def _retryable(error: TandemError) -> TandemError:
    return type(error)(error.message, retry_after_s=1.0)
