"""
Conversations: their checks, and the values that a chat template is rendered with.

Field paths start at the message that has the conversation as `chat`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from scheduler_svc.frontend.text.chat_template import RESERVED_ARGS, Conversation
from tandem.errors import EmptyPrompt, FeatureUnsupported, InvalidParameter
from tandem.inference.v1 import chat_pb2

MAX_CHAT_MESSAGES = 4096
MAX_TOOLS = 128
MAX_JSON_DEPTH = 64
MAX_JSON_CHARS = 1 << 18
"""Most characters of a conversation's JSON texts, together."""
MAX_JSON_SIGNS = 1 << 14
"""
Most signs of `JSON_SIGNS` outside of strings, of all texts together. They bound the values, each of
which takes a hundred times the memory of its two or three bytes; 128 tools of ten parameters have
about 11,000.
"""
JSON_SIGNS = "[{,:"
MESSAGES = "chat.messages"
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""A string of a JSON text, the last one also without its end. Possessive, so in linear time."""


def read_chat(chat: chat_pb2.ChatPrompt) -> Conversation:
    """
    Check a conversation, and return what the template is rendered with. It may take tens of
    milliseconds: call it on a thread.

    Raises:
        EmptyPrompt: There is no message.
        InvalidParameter: A field is wrong; the error has its path.
        FeatureUnsupported: A message has a part of an unknown kind.
    """
    if not chat.messages:
        raise EmptyPrompt("chat must have at least one message.", field=MESSAGES)
    _check_count(len(chat.messages), MAX_CHAT_MESSAGES, "messages", MESSAGES)
    _check_count(len(chat.tools), MAX_TOOLS, "tools", "chat.tools")
    _check_json_size(chat)
    messages = [_message(message, f"{MESSAGES}[{at}]") for at, message in enumerate(chat.messages)]
    if chat.continue_final_message and not _has_text(messages[-1]):
        raise InvalidParameter(
            "continue_final_message needs a last message with text.",
            field="chat.continue_final_message",
        )
    if chat.continue_final_message and chat.add_generation_prompt:
        raise InvalidParameter(
            "add_generation_prompt and continue_final_message exclude each other.",
            field="chat.continue_final_message",
        )
    adds = chat.add_generation_prompt
    if not chat.HasField("add_generation_prompt"):
        adds = not chat.continue_final_message
    return Conversation(
        messages=messages,
        tools=[
            _object(tool.definition_json, f"chat.tools[{at}].definition_json")
            for at, tool in enumerate(chat.tools)
        ],
        template_args=_template_args(chat),
        add_generation_prompt=adds,
        continue_final_message=chat.continue_final_message,
    )


def _check_count(count: int, limit: int, what: str, field: str) -> None:
    if count > limit:
        raise InvalidParameter(f"chat must have at most {limit} {what}, got {count}.", field=field)


def _check_json_size(chat: chat_pb2.ChatPrompt) -> None:
    """Check the JSON texts together, before anything is made of them."""
    num_chars = num_signs = 0
    for path, text in _json_texts(chat):
        num_chars += len(text)
        if num_chars > MAX_JSON_CHARS:
            raise InvalidParameter(
                "the JSON texts of chat (template_args_json, definition_json, arguments_json) must "
                f"have at most {MAX_JSON_CHARS} characters together, and pass that here: leave out "
                "tools or old calls of tools, or shorten them.",
                field=path,
                metadata={"limit": str(MAX_JSON_CHARS)},
            )
        num_signs += _num_signs(text, MAX_JSON_SIGNS - num_signs)
        if num_signs > MAX_JSON_SIGNS:
            raise InvalidParameter(
                "the JSON texts of chat (template_args_json, definition_json, arguments_json) must "
                f"have at most {MAX_JSON_SIGNS} of the signs {' '.join(JSON_SIGNS)} outside of "
                "strings together, and pass that here: send fewer values.",
                field=path,
                metadata={"limit": str(MAX_JSON_SIGNS)},
            )


def _json_texts(chat: chat_pb2.ChatPrompt) -> Iterator[tuple[str, str]]:
    """Yield the JSON texts of a conversation with their paths."""
    yield "chat.template_args_json", chat.template_args_json
    for at, tool in enumerate(chat.tools):
        yield f"chat.tools[{at}].definition_json", tool.definition_json
    for at, message in enumerate(chat.messages):
        for call_at, call in enumerate(message.tool_calls):
            path = f"{MESSAGES}[{at}].tool_calls[{call_at}].arguments_json"
            yield path, call.arguments_json


def _num_signs(text: str, enough: int) -> int:
    """Return the number of signs outside of strings; up to `enough`, those inside may count."""
    num = sum(map(text.count, JSON_SIGNS))
    return num if num <= enough else sum(map(_STRING.sub("", text).count, JSON_SIGNS))


def _message(message: chat_pb2.ChatMessage, path: str) -> dict[str, Any]:
    if not message.role:
        raise InvalidParameter("role must not be empty.", field=f"{path}.role")
    found: dict[str, Any] = {"role": message.role}
    if message.parts:
        if message.HasField("content"):
            raise InvalidParameter("set content or parts, not both.", field=f"{path}.parts")
        found["content"] = [
            {"type": "text", "text": _text(part, f"{path}.parts[{at}]")}
            for at, part in enumerate(message.parts)
        ]
    elif message.HasField("content"):
        found["content"] = message.content
    if message.HasField("name"):
        found["name"] = message.name
    if message.HasField("reasoning"):
        found["reasoning_content"] = message.reasoning
    if message.HasField("tool_call_id"):
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        found["tool_calls"] = [
            _tool_call(call, f"{path}.tool_calls[{at}]")
            for at, call in enumerate(message.tool_calls)
        ]
    return found


def _text(part: chat_pb2.ChatPart, path: str) -> str:
    if part.WhichOneof("part") is None:
        raise FeatureUnsupported("the part has no text: only text is known here.", field=path)
    return part.text


def _tool_call(call: chat_pb2.ToolCall, path: str) -> dict[str, Any]:
    if not call.name:
        raise InvalidParameter("the name of a tool must not be empty.", field=f"{path}.name")
    arguments = (
        _object(call.arguments_json, f"{path}.arguments_json") if call.arguments_json else {}
    )
    found = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return {"id": call.id, **found} if call.id else found


def _template_args(chat: chat_pb2.ChatPrompt) -> dict[str, Any]:
    path = "chat.template_args_json"
    args = _object(chat.template_args_json, path) if chat.template_args_json else {}
    if taken := sorted(RESERVED_ARGS & args.keys()):
        raise InvalidParameter(f"{taken[0]} is set by the server itself.", field=path)
    return args


def _has_text(message: dict[str, Any]) -> bool:
    content = message.get("content")
    last = content[-1]["text"] if isinstance(content, list) else content
    return bool(last and last.strip())


def _object(text: str, path: str) -> dict[str, Any]:
    """Return the object that a JSON text is, with its keys in order and integers of any size."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        why = str(error)[:100]
        raise InvalidParameter(f"the text is not JSON: {why}", field=path) from error
    if not isinstance(value, dict):
        raise InvalidParameter("the JSON text must be an object.", field=path)
    _check_values(value, path)
    return value


def _check_values(value: dict[str, Any], path: str) -> None:
    """Check the depth of a value, and that its strings have no half of a surrogate pair."""
    level: list[Any] = [value]
    strings: list[str] = []
    for _ in range(MAX_JSON_DEPTH):
        strings += (one for one in level if isinstance(one, str))
        objects = [one for one in level if isinstance(one, dict)]
        strings += (key for one in objects for key in one)
        lists = [one for one in level if isinstance(one, list)]
        level = [inside for one in lists for inside in one]
        level += (inside for one in objects for inside in one.values())
    if level:
        raise InvalidParameter(
            f"the JSON text is nested more than {MAX_JSON_DEPTH} levels deep.", field=path
        )
    try:
        "".join(strings).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise InvalidParameter(
            f"a string of the JSON text has half a surrogate pair, \\u{ord(half):04x}: write both "
            "halves, or U+FFFD.",
            field=path,
        ) from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
