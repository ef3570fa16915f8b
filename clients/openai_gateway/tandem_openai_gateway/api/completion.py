"""Requests of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from tandem_openai_gateway.api.common import (
    MAX_PROMPTS,
    Asked,
    GenerationFields,
    asked,
    read_body,
    too_many_prompts,
)
from tandem_openai_gateway.api.field_names import Naming, renamed
from tandem_openai_gateway.api.refused import unsupported
from tandem_openai_gateway.errors import ApiError
from tandem_openai_gateway.upstream import Prompt

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default, which clients of this endpoint know."""


class CompletionFields(GenerationFields, kw_only=True):
    """Body of a request; a prompt is a text or a list of ids, and there may be several."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


def read_completion(body: bytes) -> Asked:
    """
    Decode and check a request.

    Raises:
        ApiError: It cannot be served.
    """
    fields = read_body(body, CompletionFields)
    if fields.add_special_tokens is False:
        raise unsupported("add_special_tokens")
    prompts = prompts_of(fields.prompt)
    if fields.max_tokens is None:
        fields.max_tokens = DEFAULT_MAX_TOKENS
    options = {"logprobs": fields.logprobs, "prompt_logprobs": _prompt_logprobs(fields)}
    has_ids = any(prompt.text is None for prompt in prompts)
    if fields.echo and has_ids and options["prompt_logprobs"] is None:
        raise unsupported("echo", "a prompt of ids has no text to return")
    if fields.stream and options["prompt_logprobs"] is not None:
        name = "prompt_logprobs" if fields.prompt_logprobs is not None else "echo"
        raise unsupported(name, "log probabilities of the prompt are not streamed")
    return asked(
        fields,
        prompts,
        options=options,
        echoes=bool(fields.echo),
        prompt_logprobs=fields.prompt_logprobs,
        naming=_naming(fields, len(prompts)),
    )


def _naming(fields: CompletionFields, num_prompts: int) -> Naming:
    names = {}
    if fields.prompt_logprobs is None:
        names["prompt_logprobs"] = "echo" if fields.logprobs is None else "logprobs"

    def naming(name: str) -> str:
        # It is not told which of several prompts an index is about.
        is_of_one = num_prompts > 1 and name.startswith("prompt[")
        return "prompt" if is_of_one else renamed(name, names)

    return naming


def _prompt_logprobs(fields: CompletionFields) -> int | None:
    """Return the number of likeliest tokens to tell with each token of the prompt, or None."""
    asked_for = [fields.prompt_logprobs]
    if fields.echo:
        asked_for += [fields.logprobs, 0 if fields.max_tokens == 0 else None]
    return max((one for one in asked_for if one is not None), default=None)


def prompts_of(prompt: str | list[str | int | list[int]]) -> tuple[Prompt, ...]:
    """
    Return the prompts of a request: texts, or lists of ids.

    Raises:
        ApiError: There is none, there are too many, or texts, ids and lists are mixed.
    """
    if isinstance(prompt, str):
        return (Prompt(text=prompt),)
    kinds = {type(one) for one in prompt}
    if kinds == {int}:
        return (Prompt(token_ids=cast("Sequence[int]", prompt)),)
    if len(prompt) > MAX_PROMPTS:
        raise too_many_prompts(len(prompt))
    if kinds == {str}:
        return tuple(Prompt(text=one) for one in prompt if isinstance(one, str))
    if kinds == {list}:
        return tuple(Prompt(token_ids=one) for one in prompt if isinstance(one, list))
    if not kinds:
        raise _refusal("prompt must not be an empty list", "empty_prompt")
    raise _refusal("prompt must be one text, one list of ids, or a list of either")


def _refusal(message: str, code: str = "invalid_parameter") -> ApiError:
    return ApiError(400, message, param="prompt", code=code)
