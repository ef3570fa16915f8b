"""Requests of /tokenize and /detokenize, in the form of vLLM's server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from tandem.inference.v1 import tokens_pb2
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
from tandem_openai_gateway.api.field_names import Naming, renamed, unchanged
from tandem_openai_gateway.api.message_size import check_fits, check_prompt_fits
from tandem_openai_gateway.api.refused import unsupported
from tandem_openai_gateway.api.scheduler_errors import answered
from tandem_openai_gateway.errors import ApiError
from tandem_openai_gateway.upstream import Prompt, detokenize_request, tokenize_request


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeAsked:
    """
    A question for ids, checked.

    Attributes:
        model: Name of the model; None = any.
        request: Message for the scheduler.
        with_texts: True if the text of each id is told.
        naming: Tells how the question names fields, for errors about them.
    """

    model: str | None
    request: tokens_pb2.TokenizeRequest
    with_texts: bool
    naming: Naming


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeAsked:
    """A question for the text of ids; attributes as for `TokenizeAsked`."""

    model: str | None
    request: tokens_pb2.DetokenizeRequest
    naming: Naming


def read_tokenize(body: bytes, max_bytes: int | None) -> TokenizeAsked:
    """
    Decode and check a question for ids, and build its message.

    Args:
        body: Body of the question.
        max_bytes: Size of the largest message that the schedulers take; None = not known.

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
    check_prompt_fits(Prompt(text=fields.prompt), max_bytes)
    naming = unchanged if fields.messages is None else _of_conversation
    with answered(naming):
        request = tokenize_request(fields.prompt, fields.options())
    check_fits(request, max_bytes)
    return TokenizeAsked(
        model=fields.model,
        request=request,
        with_texts=bool(fields.return_token_strs),
        naming=naming,
    )


def _of_conversation(name: str) -> str:
    return renamed(name, {"prompt": "messages"})


def _of_ids(name: str) -> str:
    return renamed(name, {"prompt": "tokens"})


def read_detokenize(body: bytes, max_bytes: int | None) -> DetokenizeAsked:
    """
    Decode a question for the text of ids, and build its message; arguments as `read_tokenize`.

    Raises:
        ApiError: It cannot be answered.
    """
    fields = read_body(body, DetokenizeFields)
    check_prompt_fits(Prompt(token_ids=fields.tokens), max_bytes)
    with answered(_of_ids):
        request = detokenize_request(fields.tokens, keep_special_tokens=False, model=None)
    check_fits(request, max_bytes)
    return DetokenizeAsked(model=fields.model, request=request, naming=_of_ids)
