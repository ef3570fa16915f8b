"""Answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from tandem_openai_gateway.answers.format import DONE, Head, data_event
from tandem_openai_gateway.answers.logprobs import (
    CompletionLogprobs,
    PromptLogprob,
    completion_logprobs,
    echoed_logprobs,
    prompt_logprobs,
)
from tandem_openai_gateway.answers.output import (
    ChoiceOutput,
    UsageBody,
    WholeOutput,
    finish_reason,
    usage_body,
)
from tandem_openai_gateway.api.common import Asked
from tandem_openai_gateway.errors import ErrorAnswer
from tandem_openai_gateway.upstream import (
    Delta,
    Finished,
    PromptLogprobs,
    Usage,
    joined_prompt,
)


class CompletionChoice(msgspec.Struct, kw_only=True):
    """
    One choice, or its news in a stream; `stop_reason` is the stop string or token id that ended it.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class CompletionBody(msgspec.Struct, kw_only=True):
    """Body of an answer, and of each event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | UnsetType | None = UNSET
    system_fingerprint: str


class CompletionFormat:
    """
    Form of the answer to one request. Choices are numbered through all prompts: those of the first
    prompt come first.
    """

    def __init__(self, head: Head, asked: Asked) -> None:
        self._head = head
        self._asked = asked
        self._id = f"cmpl-{head.request_id}"
        self._usage: UnsetType | None = None if asked.includes_usage else UNSET
        self._offsets: dict[int, int] = {}
        """Length of the tokens' texts so far by choice, where log probabilities are told."""

    def whole(self, output: WholeOutput) -> CompletionBody:
        """Return the body of an answer that is not streamed."""
        choices = [
            self._choice(place, index, one, joined_prompt(output.prompts.get(place, ())))
            for place, choices in enumerate(output.choices)
            for index, one in enumerate(choices)
        ]
        return self._body(choices, usage_body(output.usages))

    def opening(self) -> bytes:
        """Return the prompts, if they were asked for."""
        if not self._asked.echoes:
            return b""
        return b"".join(
            self._event(CompletionChoice(index=self._index(place, index), text=prompt.text or ""))
            for place, prompt in enumerate(self._asked.prompts)
            for index in range(self._asked.num_choices)
        )

    def delta(self, place: int, delta: Delta) -> bytes:
        """Return the event for new output."""
        index = self._index(place, delta.choice)
        choice = CompletionChoice(index=index, text=delta.text)
        if delta.logprobs:
            offset = self._offsets.get(index, 0)
            choice.logprobs = completion_logprobs(delta.logprobs, offset)
            self._offsets[index] = offset + sum(len(one.text) for one in delta.logprobs)
        if self._asked.has_token_ids:
            choice.token_ids = list(delta.token_ids)
        return self._event(choice)

    def finished(self, place: int, finished: Finished) -> bytes:
        """Return the event for the end of a choice."""
        choice = CompletionChoice(
            index=self._index(place, finished.choice),
            text="",
            finish_reason=finish_reason(finished.reason),
            stop_reason=finished.matched,
        )
        return self._event(choice)

    def closing(self, usages: Sequence[Usage]) -> bytes:
        """Return the usage, if it was asked for, and the end."""
        if not self._asked.includes_usage:
            return DONE
        return data_event(self._body([], usage_body(usages))) + DONE

    def failed(self, error: ErrorAnswer) -> bytes:
        """Return the error as the last event."""
        return data_event(error)

    def _choice(
        self, place: int, index: int, output: ChoiceOutput, prompt: PromptLogprobs | None
    ) -> CompletionChoice:
        assert output.finished is not None
        asked, echo, logprobs = self._asked, "", None
        num_top = asked.options.get("logprobs")
        if num_top is not None:
            logprobs = completion_logprobs(output.logprobs, 0)
        if asked.echoes:
            text = asked.prompts[place].text
            echo = "".join(prompt.texts) if text is None and prompt is not None else text or ""
            if num_top is not None and prompt is not None:
                logprobs = echoed_logprobs(prompt, num_top, output.logprobs)
        return CompletionChoice(
            index=self._index(place, index),
            text=echo + output.text,
            logprobs=logprobs,
            finish_reason=finish_reason(output.finished.reason),
            stop_reason=output.finished.matched,
            token_ids=output.token_ids if self._asked.has_token_ids else UNSET,
            prompt_logprobs=self._prompt_logprobs(prompt),
        )

    def _prompt_logprobs(
        self, prompt: PromptLogprobs | None
    ) -> list[dict[str, PromptLogprob] | None] | UnsetType:
        num_top = self._asked.prompt_logprobs
        return UNSET if num_top is None or prompt is None else prompt_logprobs(prompt, num_top)

    def _index(self, place: int, choice: int) -> int:
        return place * self._asked.num_choices + choice

    def _event(self, choice: CompletionChoice) -> bytes:
        return data_event(self._body([choice], self._usage))

    def _body(
        self, choices: list[CompletionChoice], usage: UsageBody | UnsetType | None
    ) -> CompletionBody:
        return CompletionBody(
            id=self._id,
            created=self._head.created_s,
            model=self._head.model,
            choices=choices,
            usage=usage,
            system_fingerprint=self._head.fingerprint,
        )
