"""Commands of the conformance program as arguments of the client's methods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tandem_client import NO_RETRY, ChannelOptions, RetryPolicy

Command = dict[str, Any]
"""One line of the input, as clients/conformance/README.md explains it."""

_SOON = RetryPolicy(max_attempts=9, initial_delay_s=0.001, max_delay_s=0.001)
_POLICIES = {"none": NO_RETRY, "soon": _SOON, None: RetryPolicy()}


def connection_options(command: Command) -> dict[str, Any]:
    """Return the keyword arguments with which a client connects for a command."""
    options: dict[str, Any] = {}
    if "keepalive_ms" in command:
        silence_s = command["keepalive_ms"] / 1000
        options["options"] = ChannelOptions(keepalive_s=silence_s, keepalive_timeout_s=silence_s)
    files: dict[str, Any] = {
        name: Path(command[name]) for name in ("ca", "cert", "key") if name in command
    }
    names = {"api_key": command.get("token", ""), "server_name": command.get("server_name")}
    return {
        "address": command["targets"],
        "retry": _POLICIES[command.get("retry")],
        **options,
        **files,
        **names,
    }


def deadline_s(command: Command) -> float | None:
    """Return the deadline of a command in seconds."""
    return command["deadline_ms"] / 1000 if "deadline_ms" in command else None


def generate_options(request: dict[str, Any]) -> dict[str, Any]:
    """Return a GenerateRequest in JSON as keyword arguments of `generate`."""
    left = dict(request)
    options: dict[str, Any] = {"prompt": left.pop("text", None)}
    if "token_ids" in left:
        options["token_ids"] = left.pop("token_ids")["ids"]
    if "chat" in left:
        options |= chat_options(left.pop("chat"))
    for part in ("sampling", "stopping", "response"):
        options |= left.pop(part, {})
    if "seed" in options:  # JSON of protobuf may write it as a text
        options["seed"] = int(options["seed"])
    if "resume" in left:
        options["resume"] = left.pop("resume")["choices"]
    if "logit_bias" in options:
        options["logit_bias"] = {int(one): bias for one, bias in options["logit_bias"].items()}
    return {**options, **left}


def chat_options(chat: dict[str, Any]) -> dict[str, Any]:
    """Return a ChatPrompt in JSON as keyword arguments of the client's methods."""
    options: dict[str, Any] = {
        name: chat[name]
        for name in ("add_generation_prompt", "continue_final_message")
        if name in chat
    }
    options["messages"] = [_openai_message(one) for one in chat["messages"]]
    if "tools" in chat:
        options["tools"] = [json.loads(tool["definition_json"]) for tool in chat["tools"]]
    if "template_args_json" in chat:
        options["template_args"] = json.loads(chat["template_args_json"])
    return options


def _openai_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a ChatMessage as callers of the Python client write it."""
    found = dict(message)
    if "parts" in found:
        found["content"] = [{"type": "text", **part} for part in found.pop("parts")]
    if "tool_calls" in found:
        found["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": call["name"],
                    "arguments": json.loads(call["arguments_json"]),
                },
            }
            for call in found["tool_calls"]
        ]
    return found
