"""
Conversations: messages in the shape of OpenAI's API, tools, and the `ChatPrompt` they become.

A key whose value is None counts as absent, since libraries fill in all keys that a message may
have. Any other key that is not known is refused: it would be left out of the prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tandem.errors import InvalidParameter
from tandem.inference.v1 import chat_pb2
from tandem.wording import nearest
from tandem_client.params import PromptOptions
from tandem_client.request.fields import json_object, listed, set_field

_MESSAGE_KEYS = {
    "role": "role",
    "name": "name",
    "tool_call_id": "tool_call_id",
    "reasoning": "reasoning",
    "reasoning_content": "reasoning",
}
"""Keys of a message that are texts, and their fields in ChatMessage."""
_OTHER_MESSAGE_KEYS = ("content", "tool_calls")
_PART_KEYS = ("type", "text")
_CALL_KEYS = ("id", "type", "function")
_FUNCTION_KEYS = ("name", "arguments")


def set_chat(chat: chat_pb2.ChatPrompt, options: PromptOptions) -> None:
    """
    Fill in a conversation from the options `messages`, `tools` and those of the template.

    Raises:
        InvalidParameter: A value cannot be sent, or a key is unknown; the error has the path.
    """
    messages = listed("messages", options.get("messages"), path="prompt.messages")
    for index, message in enumerate(messages):
        _set_message(chat.messages.add(), f"chat.messages[{index}]", message)
    tools = options.get("tools")
    for index, tool in enumerate(
        [] if tools is None else listed("tools", tools, path="chat.tools")
    ):
        path = f"chat.tools[{index}]"
        text = json_object(f"tools[{index}]", tool, path=path)
        set_field(chat.tools.add(), path, "definition_json", text)
    args = options.get("template_args")
    if args is not None:
        path = "chat.template_args_json"
        text = json_object("template_args", args, path=path)
        set_field(chat, path, "template_args_json", text)
    for name in ("add_generation_prompt", "continue_final_message"):
        value = options.get(name)
        if value is not None:
            set_field(chat, f"chat.{name}", name, value)


def _set_message(turn: chat_pb2.ChatMessage, path: str, message: object) -> None:
    given = _present(message, path, (*_MESSAGE_KEYS, *_OTHER_MESSAGE_KEYS))
    assert isinstance(message, Mapping)
    if "role" not in given or not ("content" in message or "tool_calls" in given):
        raise InvalidParameter(
            f"{_called(path)} must have the keys role and content, or role and tool_calls",
            field=path,
        )
    if "reasoning" in given and "reasoning_content" in given:
        raise InvalidParameter(
            f"{_called(path)} has both reasoning and reasoning_content, which are the same",
            field=f"{path}.reasoning",
        )
    for key, name in _MESSAGE_KEYS.items():
        if key in given:
            set_field(turn, f"{path}.{name}", name, _text(given[key], key, f"{path}.{name}"))
    _set_content(turn, path, given.get("content"))
    calls = listed("tool_calls", given.get("tool_calls", []), path=f"{path}.tool_calls")
    for index, call in enumerate(calls):
        _set_call(turn.tool_calls.add(), f"{path}.tool_calls[{index}]", call)


def _set_content(turn: chat_pb2.ChatMessage, path: str, content: object) -> None:
    """Set the content of a message, a text or a list of pieces; None leaves it unset."""
    if content is None:
        return
    if isinstance(content, str):
        set_field(turn, f"{path}.content", "content", content)
        return
    for index, part in enumerate(listed("content", content, path=f"{path}.content")):
        inside = f"{path}.content[{index}]"
        given = _present(part, inside, _PART_KEYS)
        if given.get("type") != "text" or "text" not in given:
            raise InvalidParameter(
                f'{_called(inside)} must be {{"type": "text", "text": ...}}: messages have text '
                "only",
                field=inside,
            )
        text = _text(given["text"], "text", f"{inside}.text")
        set_field(turn.parts.add(), f"{inside}.text", "text", text)


def _set_call(call: chat_pb2.ToolCall, path: str, given_call: object) -> None:
    given = _present(given_call, path, _CALL_KEYS)
    if given.get("type", "function") != "function":
        raise InvalidParameter(
            f'the type of {_called(path)} must be "function", not {given["type"]!r}',
            field=f"{path}.type",
        )
    inside = f"{path}.function"
    function = _present(given.get("function"), inside, _FUNCTION_KEYS)
    if "name" not in function:
        raise InvalidParameter(f"{_called(inside)} must have the key name", field=inside)
    if "id" in given:
        set_field(call, f"{path}.id", "id", _text(given["id"], "id", f"{path}.id"))
    name = _text(function["name"], "name", f"{inside}.name")
    set_field(call, f"{inside}.name", "name", name)
    arguments = function.get("arguments")
    if arguments is not None:
        where = f"{inside}.arguments"
        if not isinstance(arguments, str):
            arguments = json_object("arguments", arguments, path=where)
        set_field(call, where, "arguments_json", arguments)


def _present(given: object, path: str, known: Collection[str]) -> dict[str, Any]:
    """Return the keys of a mapping that have a value; refuse what is no mapping, and other keys."""
    if not isinstance(given, Mapping):
        raise InvalidParameter(
            f"{_called(path)} must be a dict, not {type(given).__name__}", field=path
        )
    present = {key: value for key, value in given.items() if value is not None}
    for key in present:
        if key not in known:
            meant = nearest(str(key), known)
            hint = f"did you mean {meant!r}?" if meant else f"known are {', '.join(known)}"
            raise InvalidParameter(
                f"{_called(path)} has the unknown key {key!r}: {hint}", field=f"{path}.{key}"
            )
    return present


def _text(value: object, name: str, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidParameter(f"{name} must be text, not {type(value).__name__}", field=path)
    return value


def _called(path: str) -> str:
    """Return what a caller calls this path: option and index."""
    return path.removeprefix("chat.")
