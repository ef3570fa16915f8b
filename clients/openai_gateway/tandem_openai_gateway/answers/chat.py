"""Answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from tandem_openai_gateway.answers.format import DONE, Head, data_event
from tandem_openai_gateway.answers.logprobs import ChatLogprobs, chat_logprobs
from tandem_openai_gateway.answers.output import (
    ChoiceOutput,
    UsageBody,
    WholeOutput,
    finish_reason,
    usage_body,
)
from tandem_openai_gateway.api.common import Asked
from tandem_openai_gateway.errors import ErrorAnswer
from tandem_openai_gateway.upstream import Delta, Finished, Usage


class AssistantMessage(msgspec.Struct, kw_only=True):
    """Message of the model."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One whole choice; `stop_reason` is the stop string or token id that ended it."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Body of an answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    system_fingerprint: str


class MessageDelta(msgspec.Struct, kw_only=True):
    """New part of a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """News of one choice."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """Body of an event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    system_fingerprint: str


class ChatFormat:
    """Form of the answer to one request."""

    def __init__(self, head: Head, asked: Asked) -> None:
        self._head = head
        self._asked = asked
        self._id = f"chatcmpl-{head.request_id}"
        self._usage: UnsetType | None = None if asked.includes_usage else UNSET

    def whole(self, output: WholeOutput) -> ChatCompletion:
        """Return the body of an answer that is not streamed."""
        return ChatCompletion(
            id=self._id,
            created=self._head.created_s,
            model=self._head.model,
            choices=[self._choice(place, one) for place, one in enumerate(output.choices[0])],
            usage=usage_body(output.usages),
            system_fingerprint=self._head.fingerprint,
        )

    def opening(self) -> bytes:
        """Return an event for each choice that says who speaks."""
        return b"".join(
            self._event(
                ChatChunkChoice(index=place, delta=MessageDelta(role="assistant", content=""))
            )
            for place in range(self._asked.num_choices)
        )

    def delta(self, place: int, delta: Delta) -> bytes:
        """Return the event for new output."""
        del place  # a chat has one prompt
        choice = ChatChunkChoice(index=delta.choice, delta=MessageDelta(content=delta.text))
        if delta.logprobs:
            choice.logprobs = chat_logprobs(delta.logprobs)
        if self._asked.has_token_ids:
            choice.token_ids = list(delta.token_ids)
        return self._event(choice)

    def finished(self, place: int, finished: Finished) -> bytes:
        """Return the event for the end of a choice."""
        del place
        choice = ChatChunkChoice(
            index=finished.choice,
            delta=MessageDelta(),
            finish_reason=finish_reason(finished.reason),
            stop_reason=finished.matched,
        )
        return self._event(choice)

    def closing(self, usages: Sequence[Usage]) -> bytes:
        """Return the usage, if it was asked for, and the end."""
        if not self._asked.includes_usage:
            return DONE
        return data_event(self._chunk([], usage_body(usages))) + DONE

    def failed(self, error: ErrorAnswer) -> bytes:
        """Return the error as the last event."""
        return data_event(error)

    def _choice(self, index: int, output: ChoiceOutput) -> ChatChoice:
        assert output.finished is not None
        return ChatChoice(
            index=index,
            message=AssistantMessage(content=output.text),
            logprobs=chat_logprobs(output.logprobs) if self._has_logprobs else None,
            finish_reason=finish_reason(output.finished.reason),
            stop_reason=output.finished.matched,
            token_ids=output.token_ids if self._asked.has_token_ids else UNSET,
        )

    @property
    def _has_logprobs(self) -> bool:
        return self._asked.options.get("logprobs") is not None

    def _event(self, choice: ChatChunkChoice) -> bytes:
        return data_event(self._chunk([choice], self._usage))

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: UsageBody | UnsetType | None
    ) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._head.created_s,
            model=self._head.model,
            choices=choices,
            usage=usage,
            system_fingerprint=self._head.fingerprint,
        )
