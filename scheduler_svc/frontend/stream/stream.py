"""Messages of one request, in their order: Started, Progress, Delta, Finished, Done."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence

from scheduler_svc.core.request.events import ProgressKind
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.frontend.stream.delta import OutputDelta
from scheduler_svc.frontend.stream.inbox import ChoiceNews, StreamInbox
from scheduler_svc.frontend.stream.prompt_logprobs import PromptTeller
from scheduler_svc.frontend.text.output import ChoiceStart, OutputChunk, OutputText, PriorEnd
from scheduler_svc.ipc.messages import Accepted, StreamEnd, StreamProgress
from tandem.errors import InternalError, TandemError
from tandem.inference.v1 import request_pb2, stream_pb2
from tandem.inference.v1.inference_service_pb2 import GenerateResponse

Message = GenerateResponse | OutputDelta
"""Message of a stream."""
EndAtStopString = Callable[[int, int], None]
"""Called at most once per choice, with the choice and its number of output tokens up to the one
that completed a stop string."""


class RequestOutput:
    """
    Messages of a request that was submitted to the core, made of what is in its inbox.

    Everything that arrives between two `take` is merged into the next messages.

    Attributes:
        inbox: Inbox of the request.
        is_started: True once the request was accepted and `start` returned its first messages.
        is_over: True once the last message was returned.
        started: The first message, with the lengths that the core decided once it accepted.
        failure: Error that ends the request, after the messages returned so far.
        pause_s: Shortest time, in seconds, until the next `take`, unless the request ends before.
    """

    def __init__(
        self,
        inbox: StreamInbox,
        starts: Sequence[ChoiceStart],
        *,
        started: stream_pb2.Started,
        scored_prompt: Sequence[int] | None = None,
        end_at_stop_string: EndAtStopString,
        blocked_by: Callable[[], str],
        text_of: Callable[[int], str],
    ) -> None:
        """
        Args:
            inbox: Inbox of the request.
            starts: Start of each choice.
            started: The first message.
            scored_prompt: The prompt, if its log probabilities are to be told.
            end_at_stop_string: See `EndAtStopString`.
            blocked_by: Returns the reason why no request is computed; empty while requests are.
            text_of: Returns the text of a token by itself.
        """
        self.started = started
        self._teller = PromptTeller(scored_prompt or (), text_of)
        self._interval_s = started.response.min_delta_interval_s
        self._end_at_stop_string = end_at_stop_string
        self._blocked_by = blocked_by
        self._choices = [
            _Choice(number, start, text_of, started.response) for number, start in enumerate(starts)
        ]
        self.inbox = inbox
        self.is_started = False
        self.is_over = False
        self.failure: TandemError | None = None
        self.pause_s = 0.0

    @property
    def ends(self) -> dict[int, StreamEnd]:
        """The core's account of each choice that it ended, by number."""
        return {one.number: one.end for one in self._choices if one.end is not None}

    def start(self) -> list[Message]:
        """
        Return the first messages; none while the core has not accepted the request.

        Raises:
            TandemError: The core refused the request.
        """
        accepted = self.inbox.accepted
        if accepted is None:
            refusal = self.inbox.take().failure
            if refusal is not None:
                raise refusal
            return []
        self.is_started = True
        return [
            GenerateResponse(started=_as_accepted(self.started, accepted)),
            *(
                _finished_before(choice.number, choice.output, choice.prior_end)
                for choice in self._choices
                if choice.prior_end is not None
            ),
        ]

    def take(self) -> list[Message]:
        """Return the messages that the news make, once the request has started."""
        choices = self._choices
        news = self.inbox.take()
        deltas = [
            message
            for one in news.choices
            for message in choices[one.choice].messages(one, self._end_at_stop_string)
        ]
        self.pause_s = self._interval_s if deltas else 0.0
        deltas = [*self._teller.messages(news, self.started.prompt_tokens), *deltas]
        # Progress that arrived together with a token happened before the token.
        if news.progress is not None or (news.is_silent and not deltas):
            progress = news.progress or self.inbox.progress
            deltas.insert(0, _progress(progress, self._blocked_by()))
        self.failure = news.failure
        if news.failure is None and all(choice.is_over for choice in choices):
            self.is_over = True
            deltas.append(_done(choices, self.started))
        return deltas


async def stream_messages(output: RequestOutput) -> AsyncGenerator[Message, None]:
    """
    Yield the messages of a request.

    Raises:
        TandemError: The request was refused or failed; output before that was yielded.
    """
    inbox = output.inbox
    while not output.is_started:
        await inbox.wait()
        for message in output.start():
            yield message
    while True:
        for message in output.take():
            yield message
        if output.failure is not None:
            raise output.failure
        if output.is_over:
            return
        await _next_news(inbox, output.pause_s)


async def _next_news(inbox: StreamInbox, interval_s: float) -> None:
    """Wait for news, and no less than `interval_s`, unless the request is over before."""
    end_s = asyncio.get_running_loop().time() + interval_s
    await inbox.wait()
    while not inbox.is_over and (left_s := end_s - asyncio.get_running_loop().time()) > 0:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(inbox.wait(), left_s)


class _Choice:
    """Output processing of one choice."""

    __slots__ = (
        "_is_end_asked",
        "_is_over_before",
        "_num_requested",
        "_text_of",
        "_with_ids",
        "_with_text",
        "end",
        "number",
        "output",
        "prior_end",
    )

    def __init__(
        self,
        number: int,
        start: ChoiceStart,
        text_of: Callable[[int], str],
        response: request_pb2.ResponseOptions,
    ) -> None:
        # Read once: a field of a message costs more than the whole rest of a delta's part here.
        self._with_text = not response.omit_text
        self._with_ids = not response.omit_token_ids
        self._num_requested = len(response.logprob_token_ids)
        self._is_end_asked = False
        self._text_of = text_of
        self._is_over_before = start.is_over
        self.number = number
        self.output = start.output
        self.prior_end = start.end
        self.end: StreamEnd | None = None

    @property
    def is_over(self) -> bool:
        """True once no more messages of the choice come."""
        return self._is_over_before or self.end is not None

    def messages(self, news: ChoiceNews, end_at_stop_string: EndAtStopString) -> list[Message]:
        """Return the messages that the news make: at most a Delta and a Finished."""
        output, end = self.output, news.end
        if news.logprobs is None:
            output.push_all(news.token_ids)
        else:
            for token_id, logprob in zip(news.token_ids, news.logprobs, strict=True):
                output.push(token_id, logprob)
        chunk = output.take() if end is None else output.finish()
        found: list[Message] = [] if chunk is None else [self._delta(chunk)]
        if end is None:
            if output.stopped is not None and not self._is_end_asked:
                self._is_end_asked = True
                end_at_stop_string(self.number, output.num_tokens)
            return found
        if output.stopped is None and output.num_tokens != end.num_output_tokens:
            raise InternalError(
                f"choice {self.number} ended after {end.num_output_tokens} output tokens, "
                f"but {output.num_tokens} arrived"
            )
        self.end = end
        return [*found, _finished(self.number, output, end)]

    def _delta(self, chunk: OutputChunk) -> OutputDelta:
        return OutputDelta(
            self.number,
            chunk,
            self._text_of,
            with_text=self._with_text,
            with_ids=self._with_ids,
            num_requested=self._num_requested,
        )


def _as_accepted(started: stream_pb2.Started, accepted: Accepted) -> stream_pb2.Started:
    """Return Started with the lengths that the core decided, as it knows the size of KV memory."""
    started.truncated_prompt_tokens += accepted.num_truncated_tokens
    started.prompt_tokens -= accepted.num_truncated_tokens
    if accepted.max_tokens is not None:
        if accepted.max_tokens < started.stopping.max_tokens:
            started.stopping.clamp_max_tokens = True  # the end of the memory ends the output
        started.stopping.max_tokens = accepted.max_tokens
    return started


def _progress(progress: StreamProgress | None, blocked_by: str) -> GenerateResponse:
    message = stream_pb2.Progress(blocked_by=blocked_by)
    if progress is None or progress.kind == ProgressKind.QUEUED:
        message.queued.position = 0 if progress is None else progress.value
    elif progress.kind == ProgressKind.SCHEDULED:
        message.scheduled.cached_tokens = progress.value
    else:
        message.prefilled.done_tokens = progress.value
    return GenerateResponse(progress=message)


def _finished(choice: int, output: OutputText, end: StreamEnd) -> GenerateResponse:
    if output.stopped is not None:
        finished = stream_pb2.Finished(
            choice=choice,
            reason=int(FinishReason.STOP_STRING),  # type: ignore[arg-type]  # numbers are the same
            stop_string=output.stopped.stop,
        )
    else:
        finished = stream_pb2.Finished(
            choice=choice,
            reason=end.reason,  # type: ignore[arg-type]  # numbers are the same
            token_id=end.matched_token,
        )
    return GenerateResponse(finished=finished)


def _finished_before(choice: int, output: OutputText, end: PriorEnd) -> GenerateResponse:
    """Return the Finished of a choice that ended with the last token its client has."""
    stop = None if output.stopped is None else output.stopped.stop
    finished = stream_pb2.Finished(
        choice=choice,
        reason=int(end.reason),  # type: ignore[arg-type]  # numbers are the same
        stop_string=stop,
        token_id=end.matched_token,
    )
    return GenerateResponse(finished=finished)


def _done(choices: Sequence[_Choice], started: stream_pb2.Started) -> GenerateResponse:
    """Return the Done of all choices; the prompt counts once, as the first computed one had it."""
    ends = [choice.end for choice in choices if choice.end is not None]
    first_token_s = [end.first_token_s for end in ends if end.first_token_s is not None]
    return GenerateResponse(
        done=stream_pb2.Done(
            usage=stream_pb2.Usage(
                prompt_tokens=ends[0].num_prompt_tokens if ends else started.prompt_tokens,
                output_tokens=sum(choice.output.num_tokens for choice in choices),
                cached_tokens=ends[0].num_cached_tokens if ends else 0,
            ),
            timings=stream_pb2.Timings(
                queue_s=min((end.queue_s for end in ends), default=0.0),
                time_to_first_token_s=min(first_token_s, default=0.0),
                total_s=max((end.total_s for end in ends), default=0.0),
                preemptions=sum(end.num_preemptions for end in ends),
            ),
        )
    )
