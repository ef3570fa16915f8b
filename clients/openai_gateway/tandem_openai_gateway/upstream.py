"""
The part of the Python client that the gateway uses. Other modules take the client's names from
here, so that a change of the client is followed in one place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.inference.v1 import chat_pb2, tokens_pb2
from tandem.inference.v1 import inference_service_pb2 as inference
from tandem_client.events import (
    Delta,
    Done,
    Event,
    Finished,
    FinishReason,
    PromptLogprobs,
    Started,
    TokenLogprobs,
    Usage,
    delta_from_proto,
)
from tandem_client.many.items import (
    END_OF_REQUESTS,
    ItemFailure,
    can_be_item,
    failure_of,
    has_too_many,
    joined_requests,
)
from tandem_client.model import Model, PromptTokens, model_from_proto, tokens_from_proto
from tandem_client.request import build_request, detokenize_request
from tandem_client.request import tokenize_request as build_tokenize_request
from tandem_client.streams.aio_stream import LoopCalls
from tandem_client.streams.prompt import joined_prompt
from tandem_client.streams.retry import RetryPolicy, is_transient

__all__ = [
    "END_OF_REQUESTS",
    "Delta",
    "Done",
    "Event",
    "FinishReason",
    "Finished",
    "ItemFailure",
    "LoopCalls",
    "Model",
    "Prompt",
    "PromptLogprobs",
    "PromptTokens",
    "RetryPolicy",
    "Started",
    "TokenLogprobs",
    "Usage",
    "can_be_item",
    "delta_from_proto",
    "detokenize_request",
    "failure_of",
    "generate_request",
    "has_too_many",
    "is_transient",
    "joined_prompt",
    "joined_requests",
    "model_from_proto",
    "progress_of",
    "tokenize_request",
    "tokens_from_proto",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Prompt of one request: exactly one attribute is set."""

    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None


def generate_request(
    prompt: Prompt, options: Mapping[str, Any], request_id: str
) -> inference.GenerateRequest:
    """
    Build the message of one request.

    Args:
        prompt: The prompt.
        options: Options by the names of `tandem_client.GenerateOptions`; None = not given. `tools`
            and `template_args` are texts of JSON objects.
        request_id: Id of the request.

    Raises:
        InvalidParameter: A value cannot be sent.
    """
    given, chat = _without_json(options)
    given |= {
        "request_id": request_id,
        "token_ids": prompt.token_ids,
        "messages": prompt.messages,
    }
    request = build_request(prompt.text, given)  # type: ignore[arg-type]  # the names are ours
    if prompt.messages is not None:
        request.chat.MergeFrom(chat)
    return request


def tokenize_request(prompt: str | None, options: Mapping[str, Any]) -> tokens_pb2.TokenizeRequest:
    """
    Build the message of a question for ids; options as for `generate_request`.

    Raises:
        InvalidParameter: A value cannot be sent.
    """
    given, chat = _without_json(options)
    request = build_tokenize_request(prompt, given)  # type: ignore[arg-type]  # the names are ours
    if prompt is None:
        request.chat.MergeFrom(chat)
    return request


def _without_json(options: Mapping[str, Any]) -> tuple[dict[str, Any], chat_pb2.ChatPrompt]:
    """Return the other options, and a conversation of what is JSON: it goes on as it is."""
    given = dict(options)
    tools, args = given.pop("tools", None), given.pop("template_args", None)
    tools = [chat_pb2.Tool(definition_json=text) for text in tools or ()]
    return given, chat_pb2.ChatPrompt(tools=tools, template_args_json=args)


def progress_of(event: Event) -> str:
    """Return a few words on an event that brings no output."""
    words = type(event).__name__.lower()
    for name in ("position", "cached_tokens", "done_tokens", "blocked_by"):
        value = getattr(event, name, None)
        if value not in (None, ""):
            words += f" {name}={value}"
    return words
