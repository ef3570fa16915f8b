"""Requests of /v1/chat/completions."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem_openai_gateway.api.common import Asked, GenerationFields, asked, read_body
from tandem_openai_gateway.api.refused import unsupported
from tandem_openai_gateway.errors import ApiError
from tandem_openai_gateway.upstream import Prompt


class ContentPart(msgspec.Struct, kw_only=True):
    """Part of a message; only text is served."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, kw_only=True):
    """One turn of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    function_call: Any = None


class ChatFields(GenerationFields, kw_only=True):
    """Body of a request."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


def read_chat(body: bytes) -> Asked:
    """
    Decode and check a request.

    Raises:
        ApiError: It cannot be served.
    """
    fields = read_body(body, ChatFields)
    for name in ("echo", "add_special_tokens"):
        if getattr(fields, name):
            raise unsupported(name)
    messages = [_message(one, f"messages[{place}]") for place, one in enumerate(fields.messages)]
    if not messages:
        raise ApiError(400, "messages must not be empty", param="messages", code="empty_prompt")
    options: dict[str, Any] = {"logprobs": _logprobs(fields)}
    if fields.max_completion_tokens is not None:
        options["max_tokens"] = fields.max_completion_tokens
    return asked(fields, (Prompt(messages=messages),), options=options)


def _message(message: Message, where: str) -> dict[str, Any]:
    for name in ("tool_calls", "tool_call_id", "function_call", "name"):
        if getattr(message, name):
            raise unsupported(f"{where}.{name}")
    return {"role": message.role, "content": text_of(message.content, where)}


def text_of(content: str | list[ContentPart] | None, where: str) -> str:
    """
    Return the text of a message.

    Raises:
        ApiError: A part is no text.
    """
    if isinstance(content, str):
        return content
    texts = []
    for place, part in enumerate(content or ()):
        if part.text is None or part.type not in TEXT_TYPES:
            raise unsupported(f"{where}.content[{place}]", "only parts of text are served")
        texts.append(part.text)
    return "".join(texts)


TEXT_TYPES = frozenset({"text", "input_text", "output_text"})
"""Types of parts that are text: those of chats and of the Responses API."""


def _logprobs(fields: ChatFields) -> int | None:
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise ApiError(
            400,
            "top_logprobs needs logprobs to be true",
            param="top_logprobs",
            code="invalid_parameter",
        )
    return None
