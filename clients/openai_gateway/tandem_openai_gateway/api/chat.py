"""Requests of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from tandem_openai_gateway.api.common import Asked, GenerationFields, asked, read_body
from tandem_openai_gateway.api.field_names import Naming, renamed
from tandem_openai_gateway.api.refused import unsupported
from tandem_openai_gateway.errors import ApiError
from tandem_openai_gateway.upstream import Prompt

MAX_MESSAGES, MAX_TOOLS = 4096, 128
"""The scheduler's limits: what is beyond them is refused before it is built."""
RawObject = Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "object"})]
"""An object as JSON, which goes on as it is: only the scheduler's template reads it."""


class ContentPart(msgspec.Struct, kw_only=True):
    """Part of a message; only text is served."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, kw_only=True):
    """One turn of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    function_call: Any = None


Messages = Annotated[list[Message], msgspec.Meta(max_length=MAX_MESSAGES)]
Tools = Annotated[list[RawObject], msgspec.Meta(max_length=MAX_TOOLS)]


def null() -> msgspec.Raw:
    """Return what a field of JSON is that was left out."""
    return msgspec.Raw(b"null")


class ChatFields(GenerationFields, kw_only=True):
    """
    Body of a request. Tools are rendered into the prompt by the model's template; calls of them in
    the output are text.
    """

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    tools: Tools | None = None
    chat_template_kwargs: RawObject = msgspec.field(default_factory=null)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


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
    messages = [message_of(one, f"messages[{place}]") for place, one in enumerate(fields.messages)]
    if not messages:
        raise ApiError(400, "messages must not be empty", param="messages", code="empty_prompt")
    options: dict[str, Any] = {
        "logprobs": _logprobs(fields),
        "token_bytes": bool(fields.logprobs) or None,
        "tools": tools_of(fields.tools),
        "template_args": json_object_of(fields.chat_template_kwargs, "chat_template_kwargs"),
        "add_generation_prompt": fields.add_generation_prompt,
        "continue_final_message": fields.continue_final_message,
    }
    if fields.max_completion_tokens is not None:
        options["max_tokens"] = fields.max_completion_tokens
    prompt = Prompt(messages=messages)
    return asked(fields, (prompt,), options=options, naming=_naming(fields))


def _naming(fields: ChatFields) -> Naming:
    names = {"prompt": "messages"}
    if fields.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    if fields.top_logprobs is not None:
        names["logprobs"] = "top_logprobs"
    return lambda name: renamed(name, names)


def message_of(message: Message, where: str) -> dict[str, Any]:
    """
    Return a message as the client takes it.

    Args:
        message: The message.
        where: Its place, for errors.

    Raises:
        ApiError: It has what is not served.
    """
    if message.function_call:
        raise unsupported(f"{where}.function_call", "it is deprecated, use tool_calls")
    content = None if message.content is None else text_of(message.content, where)
    found: dict[str, Any] = {
        "role": message.role,
        # A message without content is empty, unless it calls tools.
        "content": content if content is not None or message.tool_calls else "",
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": message.tool_calls or None,
        "reasoning_content": message.reasoning_content,
    }
    return {name: value for name, value in found.items() if value is not None}


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


def tools_of(tools: list[msgspec.Raw] | None) -> list[str] | None:
    """
    Return the texts of tools; None if there are none.

    Raises:
        ApiError: One is no object.
    """
    texts = []
    for place, tool in enumerate(tools or ()):
        text = json_object_of(tool, f"tools[{place}]")
        if text is None:
            raise _no_object(f"tools[{place}]")
        texts.append(text)
    return texts or None


def json_object_of(given: msgspec.Raw, where: str) -> str | None:
    """
    Return the text of a JSON object, which goes on as it is; None for null.

    Raises:
        ApiError: It is another thing.
    """
    raw = bytes(given)
    if raw == b"null":
        return None
    if not raw.startswith(b"{"):
        raise _no_object(where)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


def _no_object(where: str) -> ApiError:
    return ApiError(400, f"{where}: Expected `object`", param=where, code="invalid_type")


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
