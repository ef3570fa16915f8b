"""Requests of /tokenize and /detokenize, in the form of vLLM's server."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem_openai_gateway.api.chat import (
    Messages,
    RawObject,
    Tools,
    json_object_of,
    message_of,
    null,
    tools_of,
)
from tandem_openai_gateway.api.common import read_body
from tandem_openai_gateway.api.refused import unsupported
from tandem_openai_gateway.errors import ApiError


class TokenizeFields(msgspec.Struct, kw_only=True):
    """Body of a question for the ids of a prompt, a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: RawObject = msgspec.field(default_factory=null)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def options(self) -> dict[str, Any]:
        """Return the options by the client's names; None = not given."""
        messages = self.messages
        return {
            "messages": None
            if messages is None
            else [message_of(one, f"messages[{at}]") for at, one in enumerate(messages)],
            "tools": tools_of(self.tools),
            "template_args": json_object_of(self.chat_template_kwargs, "chat_template_kwargs"),
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "with_texts": self.return_token_strs,
        }


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Ids of a prompt, and the texts of each if they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeFields(msgspec.Struct, kw_only=True):
    """Body of a question for the text of ids."""

    tokens: list[int]
    model: str | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Text of ids."""

    prompt: str


def read_tokenize(body: bytes) -> TokenizeFields:
    """
    Decode and check a question for ids.

    Raises:
        ApiError: It cannot be answered.
    """
    fields = read_body(body, TokenizeFields)
    if fields.add_special_tokens is False:
        raise unsupported("add_special_tokens")
    if (fields.prompt is None) == (fields.messages is None):
        raise ApiError(
            400, "give either prompt or messages", param="prompt", code="invalid_parameter"
        )
    has_args = bytes(fields.chat_template_kwargs) != b"null"
    for name, is_given in (("tools", bool(fields.tools)), ("chat_template_kwargs", has_args)):
        if is_given and fields.messages is None:
            what = f"{name} has a meaning for a conversation only: give messages"
            raise ApiError(400, what, param=name, code="invalid_parameter")
    return fields


def read_detokenize(body: bytes) -> DetokenizeFields:
    """
    Decode a question for the text of ids.

    Raises:
        ApiError: It cannot be answered.
    """
    return read_body(body, DetokenizeFields)
