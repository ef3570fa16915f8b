"""
Conversations: their checks, and the values that a chat template is rendered with.

Field paths start at the message that has the conversation as `chat`.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from scheduler_svc.frontend.text.chat_template import RESERVED_ARGS, Conversation
from tandem.errors import EmptyPrompt, FeatureUnsupported, InvalidParameter
from tandem.inference.v1 import chat_pb2

MAX_CHAT_MESSAGES = 4096
MAX_TOOLS = 128
MAX_JSON_DEPTH = 64
MESSAGES = "chat.messages"


def read_chat(chat: chat_pb2.ChatPrompt) -> Conversation:
    """
    Check a conversation, and return what the template is rendered with.

    Raises:
        EmptyPrompt: There is no message.
        InvalidParameter: A field is wrong; the error has its path.
        FeatureUnsupported: A message has a part of an unknown kind.
    """
    if not chat.messages:
        raise EmptyPrompt("chat must have at least one message.", field=MESSAGES)
    _check_count(len(chat.messages), MAX_CHAT_MESSAGES, "messages", MESSAGES)
    _check_count(len(chat.tools), MAX_TOOLS, "tools", "chat.tools")
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
        json.dumps(value, ensure_ascii=False).encode()  # refuses half a surrogate pair
    except (ValueError, RecursionError) as error:
        why = str(error)[:100]
        raise InvalidParameter(f"the text is not JSON: {why}", field=path) from error
    if not isinstance(value, dict):
        raise InvalidParameter("the JSON text must be an object.", field=path)
    if _is_deep(value):
        raise InvalidParameter(
            f"the JSON text is nested more than {MAX_JSON_DEPTH} levels deep.", field=path
        )
    return value


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            one
            for inside in level
            if isinstance(inside, dict | list)
            for one in (inside.values() if isinstance(inside, dict) else inside)
        ]
    return bool(level)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
