"""
Lengths of prompt and output against `max_model_len`, and truncation of those that are too long.

Field paths start at GenerateRequest.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core.request.truncation import num_to_drop
from scheduler_svc.ipc.messages import Model
from tandem.errors import EmptyPrompt, PromptTooLong, TotalTooLong
from tandem.wording import counted

DEFAULT_MAX_TOKENS = 100
"""Default of max_tokens for a text; the default for a chat is all that the context has left."""
LONGEST_TRUNCATED = 16
"""
Longest text prompt that is truncated, as a multiple of max_model_len: tokenizing a longer one costs
too much.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """
    Lengths with which a request fits into max_model_len.

    Attributes:
        max_tokens: Most output tokens, with the default applied.
        num_dropped: Number of oldest prompt tokens to drop.
        fills_context: True if the end of the context bounds the output, not the wanted length.
    """

    max_tokens: int
    num_dropped: int = 0
    fills_context: bool = False


def fit_lengths(
    prompt_len: int,
    max_tokens: int | None,
    model: Model,
    *,
    prompt_field: str,
    is_chat: bool = False,
    clamps: bool = False,
) -> Fit:
    """
    Check prompt and output against `max_model_len`, or truncate them if the service does so.

    Output is cut first, down to one token; then the prompt, see `num_to_drop`. The core cuts by the
    same rule if the KV memory holds less than `max_model_len`.

    Args:
        prompt_len: Number of tokens of the prompt.
        max_tokens: Output tokens asked for; None for the default.
        model: The served model.
        prompt_field: Path of the prompt's field.
        is_chat: The default of `max_tokens` is all that the context and the KV memory have left.
        clamps: A `max_tokens` beyond that is lowered to it.

    Raises:
        EmptyPrompt: The prompt has no token.
        PromptTooLong: The prompt alone is longer than `max_model_len`.
        TotalTooLong: Prompt plus output is longer.
    """
    longest = model.max_model_len
    if prompt_len == 0:
        raise EmptyPrompt("the prompt has no token.", field=prompt_field)
    wanted = DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
    num_dropped = 0
    if model.truncates and longest > 1:
        num_dropped = num_to_drop(prompt_len, wanted, longest)
        prompt_len -= num_dropped
    check_prompt_len(prompt_len, longest, prompt_field=prompt_field)
    room = longest - prompt_len
    if max_tokens is None or clamps:
        wanted = longest if is_chat and max_tokens is None else wanted
        in_memory = longest_total(model) - prompt_len
        room = in_memory if in_memory > 0 else room  # the core refuses one that can never fit
    may_cut = max_tokens is None or clamps or model.truncates
    fitting = max(min(1, wanted), min(wanted, room)) if may_cut else wanted
    if fitting > room:
        raise TotalTooLong(
            f"the prompt has {counted(prompt_len, 'token')} and max_tokens is {fitting}, together "
            f"{prompt_len + fitting}, but max_model_len is {longest}.",
            field="stopping.max_tokens",
            metadata={
                "prompt_tokens": str(prompt_len),
                "max_tokens": str(fitting),
                "max_model_len": str(longest),
            },
        )
    return Fit(
        max_tokens=fitting,
        num_dropped=num_dropped,
        fills_context=fitting < wanted or (clamps and fitting == room),
    )


def longest_total(model: Model) -> int:
    """Return the most tokens of prompt and output that one request can have."""
    return min(model.max_model_len, model.kv_tokens or model.max_model_len)


def longest_prompt(model: Model) -> int:
    """Return the most tokens of a text or chat prompt that is tokenized."""
    return model.max_model_len * (LONGEST_TRUNCATED if model.truncates else 1)


def check_prompt_len(
    prompt_len: int, max_model_len: int, *, prompt_field: str, is_bound: bool = False
) -> None:
    """
    Check the prompt alone; with `is_bound`, `prompt_len` is only a lower bound of its length.

    Raises:
        PromptTooLong: The prompt is longer than `max_model_len`.
    """
    if prompt_len > max_model_len:
        count = f"{'at least ' if is_bound else ''}{counted(prompt_len, 'token')}"
        raise PromptTooLong(
            f"the prompt has {count}, but max_model_len is {max_model_len}.",
            field=prompt_field,
            metadata={"prompt_tokens": str(prompt_len), "max_model_len": str(max_model_len)},
        )
