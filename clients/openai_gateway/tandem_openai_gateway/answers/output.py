"""Output of the Tandem requests that answer one request of the API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from tandem_openai_gateway.upstream import (
    Delta,
    Done,
    Event,
    Finished,
    FinishReason,
    LoopCalls,
    PromptLogprobs,
    Started,
    TokenLogprobs,
    Usage,
)

QUEUED_EVENTS = 64
"""Events that wait for a slow HTTP client; then the streams are not read on."""

_FINISH_REASONS = {
    FinishReason.MAX_TOKENS: "length",
    FinishReason.CONTEXT_LIMIT: "length",
    FinishReason.DEADLINE: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.SUPERSEDED: "abort",
}
"""OpenAI's finish reasons, and vLLM's of an aborted request; all others are "stop"."""

Numbered = tuple[int, Event]
"""Number of a prompt, and an event of its stream."""


def finish_reason(reason: FinishReason) -> str:
    """Return OpenAI's name of a finish reason."""
    return _FINISH_REASONS.get(reason, "stop")


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """Tokens of the prompts that were found in the prefix cache."""

    cached_tokens: int = 0


class UsageBody(msgspec.Struct, kw_only=True):
    """Number of tokens of all prompts and of all choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails = msgspec.field(default_factory=PromptTokensDetails)


def usage_body(usages: Sequence[Usage]) -> UsageBody:
    """Return the sum of the usages of several prompts."""
    prompt = sum(one.prompt_tokens for one in usages)
    output = sum(one.output_tokens for one in usages)
    cached = sum(one.cached_tokens for one in usages)
    return UsageBody(
        prompt_tokens=prompt,
        completion_tokens=output,
        total_tokens=prompt + output,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )


@dataclass(slots=True, eq=False)
class ChoiceOutput:
    """One choice, as far as it has come."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)


@dataclass(slots=True, eq=False)
class WholeOutput:
    """Whole output of all prompts: `choices` by prompt and choice."""

    choices: list[list[ChoiceOutput]]
    usages: list[Usage] = field(default_factory=list)
    prompts: dict[int, list[PromptLogprobs]] = field(default_factory=dict)
    """Parts of each prompt, where its log probabilities were asked for."""

    def add(self, place: int, event: Event) -> None:
        """Add an event of the prompt with this number."""
        match event:
            case Delta():
                choice = self.choices[place][event.choice]
                choice.texts.append(event.text)
                choice.token_ids += event.token_ids
                choice.logprobs += event.logprobs
            case PromptLogprobs():
                self.prompts.setdefault(place, []).append(event)
            case Finished():
                self.choices[place][event.choice].finished = event
            case Done():
                self.usages.append(event.usage)


class Output:
    """
    Streams of the prompts of one request, in the order of the prompts. `close` must be called,
    whatever happened, and once.
    """

    def __init__(self, streams: Sequence[LoopCalls], on_close: Callable[[], None]) -> None:
        """
        Args:
            streams: The streams, in the order of the prompts.
            on_close: Called once, by `close`.
        """
        self._streams = streams
        self._on_close = on_close
        self._events = [stream.events() for stream in streams]

    async def accepted(self) -> Started:
        """
        Wait until all prompts were accepted; return the acceptance of the first one.

        Raises:
            TandemError: One was not.
        """
        if len(self._events) == 1:  # without a task of its own
            return await _first(self._events[0])
        started = await asyncio.gather(*map(_first, self._events))
        return started[0]

    async def events(self) -> AsyncIterator[Numbered]:
        """
        Yield what comes after the acceptance, of all streams as it comes.

        Raises:
            TandemError: A stream failed.
        """
        if len(self._events) == 1:
            async for event in self._events[0]:
                yield 0, event
            return
        merged: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue(QUEUED_EVENTS)
        tasks = [
            asyncio.create_task(_feed(place, events, merged))
            for place, events in enumerate(self._events)
        ]
        left = len(tasks)
        try:
            while left:
                item = await merged.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Cancel what still runs."""
        for stream in self._streams:
            stream.close()
        self._on_close()


async def _first(events: AsyncIterator[Event]) -> Started:
    async for event in events:
        if isinstance(event, Started):
            return event
    raise RuntimeError("a stream ended before it started")


async def _feed(
    place: int,
    events: AsyncIterator[Event],
    merged: asyncio.Queue[Numbered | Exception | None],
) -> None:
    try:
        async for event in events:
            await merged.put((place, event))
    except Exception as error:  # noqa: BLE001  # raised again by the reader of the queue
        await merged.put(error)
    else:
        await merged.put(None)
