"""Answers of /v1/responses: an object, or the complete sequence of events that make it up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from tandem_openai_gateway.answers.format import Head, named_event
from tandem_openai_gateway.answers.output import WholeOutput, finish_reason, usage_body
from tandem_openai_gateway.api.common import Asked
from tandem_openai_gateway.errors import ErrorAnswer
from tandem_openai_gateway.upstream import Delta, Finished, Usage

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class TextPart(msgspec.Struct, kw_only=True):
    """Text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = msgspec.field(default_factory=list)
    logprobs: list[Any] = msgspec.field(default_factory=list)


class MessageItem(msgspec.Struct, kw_only=True):
    """The message that is the output."""

    type: Literal["message"] = "message"
    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[TextPart]


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Number of tokens."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseBody(msgspec.Struct, kw_only=True):
    """A response; nothing of it is stored."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[MessageItem]
    parallel_tool_calls: bool = False
    previous_response_id: None = None
    store: bool = False
    temperature: float | None
    text: dict[str, Any] = msgspec.field(default_factory=lambda: {"format": {"type": "text"}})
    tool_choice: str = "none"
    tools: list[Any] = msgspec.field(default_factory=list)
    top_p: float | None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None


class ResponseEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One event of a stream; each type has some of the fields."""

    type: str
    sequence_number: int | msgspec.UnsetType = msgspec.UNSET
    response: ResponseBody | msgspec.UnsetType = msgspec.UNSET
    item_id: str | msgspec.UnsetType = msgspec.UNSET
    output_index: int | msgspec.UnsetType = msgspec.UNSET
    content_index: int | msgspec.UnsetType = msgspec.UNSET
    item: MessageItem | msgspec.UnsetType = msgspec.UNSET
    part: TextPart | msgspec.UnsetType = msgspec.UNSET
    delta: str | msgspec.UnsetType = msgspec.UNSET
    text: str | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[Any] | msgspec.UnsetType = msgspec.UNSET


class ResponsesFormat:
    """Form of the answer to one request; a stream's output is kept for the events at its end."""

    def __init__(self, head: Head, asked: Asked) -> None:
        self._head = head
        self._asked = asked
        self._item_id = f"msg_{head.request_id}"
        self._num_events = 0
        self._texts: list[str] = []
        self._is_cut = False

    def whole(self, output: WholeOutput) -> ResponseBody:
        """Return the body of an answer that is not streamed."""
        choice = output.choices[0][0]
        assert choice.finished is not None
        self._texts = choice.texts
        self._is_cut = _is_cut(choice.finished)
        return self._ended(output.usages)

    def opening(self) -> bytes:
        """Return the events up to the first text."""
        beginning = self._body("in_progress")
        item = MessageItem(id=self._item_id, status="in_progress", content=[])
        return b"".join(
            (
                self._event("response.created", response=beginning),
                self._event("response.in_progress", response=beginning),
                self._event("response.output_item.added", output_index=0, item=item),
                self._of_part("response.content_part.added", part=TextPart(text="")),
            )
        )

    def delta(self, place: int, delta: Delta) -> bytes:
        """Return the event for new text."""
        del place  # a response has one prompt
        self._texts.append(delta.text)
        return self._of_part("response.output_text.delta", delta=delta.text, logprobs=[])

    def finished(self, place: int, finished: Finished) -> bytes:
        """Return the events that close text, part and message."""
        del place
        self._is_cut = _is_cut(finished)
        text = "".join(self._texts)
        item = self._item("incomplete" if self._is_cut else "completed")
        return b"".join(
            (
                self._of_part("response.output_text.done", text=text, logprobs=[]),
                self._of_part("response.content_part.done", part=TextPart(text=text)),
                self._event("response.output_item.done", output_index=0, item=item),
            )
        )

    def closing(self, usages: Sequence[Usage]) -> bytes:
        """Return the event with the whole response."""
        body = self._ended(usages)
        return self._event(f"response.{body.status}", response=body)

    def failed(self, error: ErrorAnswer) -> bytes:
        """Return the event of a response that failed."""
        body = self._body("failed")
        body.error = {"code": "server_error", "message": error.error.message}
        return self._event("response.failed", response=body)

    def _ended(self, usages: Sequence[Usage]) -> ResponseBody:
        status: Status = "incomplete" if self._is_cut else "completed"
        body = self._body(status)
        body.output = [self._item(status)]
        if self._is_cut:
            body.incomplete_details = {"reason": "max_output_tokens"}
        total = usage_body(usages)
        body.usage = ResponseUsage(
            input_tokens=total.prompt_tokens,
            input_tokens_details={"cached_tokens": total.prompt_tokens_details.cached_tokens},
            output_tokens=total.completion_tokens,
            output_tokens_details={"reasoning_tokens": 0},
            total_tokens=total.total_tokens,
        )
        return body

    def _body(self, status: Status) -> ResponseBody:
        return ResponseBody(
            id=f"resp_{self._head.request_id}",
            created_at=self._head.created_s,
            status=status,
            model=self._head.model,
            output=[],
            **self._asked.repeated,
        )

    def _item(self, status: Status) -> MessageItem:
        part = TextPart(text="".join(self._texts))
        return MessageItem(id=self._item_id, status=status, content=[part])

    def _of_part(self, kind: str, **fields: Any) -> bytes:
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = ResponseEvent(type=kind, sequence_number=self._num_events, **fields)
        self._num_events += 1
        return named_event(kind, event)


def _is_cut(finished: Finished) -> bool:
    return finish_reason(finished.reason) == "length"
