"""Requests of /v1/responses: without state, so that each has the whole conversation."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec

from tandem_openai_gateway.api.chat import MAX_MESSAGES, ContentPart, text_of
from tandem_openai_gateway.api.common import Asked, GenerationFields, asked, read_body
from tandem_openai_gateway.api.field_names import Naming, renamed
from tandem_openai_gateway.api.refused import unsupported
from tandem_openai_gateway.errors import ApiError
from tandem_openai_gateway.upstream import Prompt

_OF_MESSAGE = re.compile(r"messages\[(\d+)\](.*)")


class InputItem(msgspec.Struct, kw_only=True):
    """One item of the input; only messages are served."""

    type: str = "message"
    role: str | None = None
    content: str | list[ContentPart] | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    """Form of the output; only plain text is served."""

    type: str = "text"


class TextOptions(msgspec.Struct, kw_only=True):
    """Options of the output's text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesFields(GenerationFields, kw_only=True):
    """Body of a request."""

    input: str | Annotated[list[InputItem], msgspec.Meta(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None
    top_logprobs: int | None = None


def read_responses(body: bytes) -> Asked:
    """
    Decode and check a request.

    Raises:
        ApiError: It cannot be served.
    """
    fields = read_body(body, ResponsesFields)
    if fields.n not in (None, 1):
        raise unsupported("n", "a response has one output")
    if fields.top_logprobs:
        raise unsupported("top_logprobs", "responses have no log probabilities")
    if fields.text is not None:
        if fields.text.format is not None and fields.text.format.type != "text":
            raise unsupported("text.format")
        if fields.text.verbosity is not None:
            raise unsupported("text.verbosity")
    repeated = {
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "temperature": fields.temperature,
        "top_p": fields.top_p,
    }
    options = {"n": None}
    if fields.max_output_tokens is not None:
        fields.max_tokens = fields.max_output_tokens
    prompt = Prompt(messages=_messages(fields))
    return asked(fields, (prompt,), options=options, repeated=repeated, naming=_naming(fields))


def _naming(fields: ResponsesFields) -> Naming:
    names = {"messages": "input", "prompt": "input"}
    if fields.max_output_tokens is not None:
        names["max_tokens"] = "max_output_tokens"
    num_before = 0 if fields.instructions is None else 1
    is_text = isinstance(fields.input, str)

    def naming(name: str) -> str:
        found = _OF_MESSAGE.fullmatch(name)
        if found is None:
            return renamed(name, names)
        place = int(found[1]) - num_before
        if place < 0:
            return "instructions"
        return "input" if is_text else f"input[{place}]{found[2]}"

    return naming


def _messages(fields: ResponsesFields) -> list[dict[str, Any]]:
    messages = []
    if fields.instructions is not None:
        messages.append({"role": "system", "content": fields.instructions})
    if isinstance(fields.input, str):
        return [*messages, {"role": "user", "content": fields.input}]
    for place, item in enumerate(fields.input):
        where = f"input[{place}]"
        if item.type != "message" or item.role is None:
            raise unsupported(where, "only messages are served")
        messages.append({"role": item.role, "content": text_of(item.content, where)})
    if not fields.input:
        raise ApiError(400, "input must not be empty", param="input", code="empty_prompt")
    return messages
