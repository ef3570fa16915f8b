"""
Keys of requests that would change the output and that Tandem does not know. They are refused,
since an output without what was asked for looks like a good one; all other unknown keys are
ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from tandem_openai_gateway.errors import ApiError

_NEVER: tuple[object, ...] = ()
_NULL = msgspec.Raw(b"null")
MAX_SAME_BYTES = 1 << 10
"""Size of a value that is not compared with those that change nothing, as it is none of them."""

CHANGES_OUTPUT: Mapping[str, tuple[object, ...]] = {
    # OpenAI's own keys.
    "audio": _NEVER,
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": _NEVER,
    "web_search_options": _NEVER,
    # Keys of vLLM's server.
    "add_generation_prompt": (True,),
    "bad_words": ([],),
    "chat_template": _NEVER,
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    "guided_choice": _NEVER,
    "guided_grammar": _NEVER,
    "guided_json": _NEVER,
    "guided_regex": _NEVER,
    "length_penalty": (1,),
    "logits_processors": ([],),
    "prompt_embeds": _NEVER,
    "prompt_logprobs": _NEVER,
    "skip_special_tokens": (True,),
    "structured_outputs": _NEVER,
    "structural_tag": _NEVER,
    "thinking_token_budget": _NEVER,
    "truncate_prompt_tokens": _NEVER,
    "use_beam_search": (False,),
    # Keys of the Responses API.
    "background": (False,),
    "conversation": _NEVER,
    "include": ([],),
    "previous_response_id": _NEVER,
    "reasoning": ({}, {"effort": "none"}),
    "truncation": ("disabled",),
}
"""The keys, each with the values beside null that change nothing."""


def refuse_unsupported(body: Mapping[str, msgspec.Raw], served: Collection[str]) -> None:
    """
    Check that nothing is asked for that would have to be ignored at the cost of the output.

    Args:
        body: The body of a request, with its values as JSON.
        served: Keys that this kind of request obeys.

    Raises:
        ApiError: A key is one of `CHANGES_OUTPUT`, with a value that changes something.
    """
    for key in (CHANGES_OUTPUT.keys() & body.keys()) - set(served):
        if not _is_one_of(body[key], (None, *CHANGES_OUTPUT[key])):
            raise unsupported(key)
    if "best_of" in body:
        num_choices = body.get("n", _NULL)
        same = 1 if len(bytes(num_choices)) > MAX_SAME_BYTES else _value(num_choices) or 1
        if not _is_one_of(body["best_of"], (None, same)):
            raise unsupported("best_of")


def _is_one_of(given: msgspec.Raw, values: tuple[object, ...]) -> bool:
    return len(bytes(given)) <= MAX_SAME_BYTES and _value(given) in values


def _value(given: msgspec.Raw) -> Any:
    return msgspec.json.decode(given)


def unsupported(param: str, why: str = "it would change the output") -> ApiError:
    """Return the error for a parameter that cannot be obeyed."""
    return ApiError(
        400,
        f"{param} is not supported here: {why}, so the request is refused rather than answered "
        "without it",
        param=param,
        code="unsupported_parameter",
    )
