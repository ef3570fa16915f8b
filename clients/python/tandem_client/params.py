"""Parameters of a completion: the options that callers may set, and the values in force."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypedDict

from tandem.inference.v1 import request_pb2

PresetName = Literal["code", "summary", "chat", "creative"]


class PromptOptions(TypedDict, total=False):
    """
    Options of a prompt. The server chooses the value of an option that is missing.

    Keys:
        messages: A conversation instead of a prompt, in the shape of OpenAI's API: dicts with role,
            content (text, a list of {"type": "text", "text": ...}, or None), and where they apply
            tool_calls, tool_call_id, name, and reasoning (or reasoning_content).
        tools: Definitions of tools, dicts with a JSON Schema each; the chat template gets them with
            their keys in the order given.
        template_args: More variables of the chat template, e.g. {"enable_thinking": False}.
        add_generation_prompt: False: no opening of an assistant turn is added after the messages.
        continue_final_message: True: the output continues the text of the last message.
        model: Name of the model that must answer; another one is refused.
        parse_special_tokens: True: names of special tokens in a text prompt become these tokens,
            and nothing is added before it, for a prompt that the caller rendered.
    """

    messages: Sequence[Mapping[str, Any]] | None
    tools: Sequence[Mapping[str, Any]] | None
    template_args: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    model: str | None
    parse_special_tokens: bool | None


class TokenizeOptions(PromptOptions, total=False):
    """
    Options of `tokenize`: those of a prompt, and one more.

    Keys:
        with_texts: True: the text of each token is returned, too.
    """

    with_texts: bool | None


class PriorOutput(TypedDict, total=False):
    """
    Output of one choice that the caller holds, with which a stream goes on.

    Keys:
        choice: Which choice, 0 unless it is given.
        token_ids: All its ids so far, in order.
        finished: True: it has ended, and nothing more comes of it.
    """

    choice: int
    token_ids: Sequence[int]
    finished: bool


class GenerateOptions(PromptOptions, total=False):
    """
    Options of a completion: those of its prompt (`PromptOptions`), and the keys below. The server
    chooses the value of an option that is missing.

    Keys:
        token_ids: Ids of the prompt's tokens, instead of a prompt.
        preset: A name in SAMPLING_PRESETS; options that are given override its values.
        temperature: 0 to 2; 0 always takes the most likely token.
        top_k: Draw from the k most likely tokens; 0 or -1 = all.
        top_p: Draw from the smallest set with this much probability, in (0, 1].
        min_p: Draw from tokens at least this many times as likely as the likeliest, 0 to 1.
        repetition_penalty: Over 1 makes tokens of prompt and output less likely; above 0.
        frequency_penalty: Makes tokens less likely for each time they are in the output, -2 to 2.
        presence_penalty: Makes tokens less likely that are in the output at all, -2 to 2.
        logit_bias: Values added to the logits of these ids, -100 to 100 each.
        allowed_token_ids: Only these ids are drawn, at most 1,024; none = all.
        seed: Key of the noise; the same seed and parameters give the same tokens.
        max_tokens: Largest number of output tokens, at least 1; unset, 100 for a text, and for a
            chat the rest of the context.
        clamp_max_tokens: True: a max_tokens over the rest of the context is lowered to it instead
            of being refused.
        min_tokens: Output tokens before which neither EOS nor a stop string ends the output.
        stop: Strings before which the output ends.
        include_stop: True: the stop string, or the text of the token, that ended the output stays
            in it.
        stop_token_ids: Tokens at which the output ends.
        ignore_eos: Continue past end-of-sequence tokens.
        time_limit_s: Seconds after which the output ends, finished or not.
        queue_limit_s: Seconds after which a request that still waits in the queue fails.
        request_id: Id chosen by the caller, unique among live requests.
        n: Number of completions of the prompt (parallel sampling), 1 to 16; events name the
            `choice` that they belong to.
        priority: Priority in the waiting queue; a lower value goes first.
        tenant: Tenant that the request counts for in limits per tenant.
        cache_salt: Salt of the prefix cache; only requests with the same salt share cached prompts.
        logprobs: Number of likeliest tokens, 0 to 20, that are returned with each token's log
            probability.
        logprob_token_ids: Ids whose log probabilities are returned at each place, too, at most 64;
            needs `logprobs`.
        prompt_logprobs: Number of likeliest tokens, 0 to 20, that are returned with the log
            probability of each token of the prompt; with max_tokens 0 nothing else is computed.
        token_bytes: True: the bytes of each token, and of the likeliest ones, are returned with
            the log probabilities, so that characters split over tokens can be put together.
        omit_text: True: outputs have ids only.
        omit_token_ids: True: outputs have text only. A stream without ids is not resumed once
            output began.
        min_delta_interval_s: Shortest time in seconds between two deltas of a choice, 0 to 10;
            output in between is merged.
        attempt_key: Key of the request: a request with the same key ends the earlier one, with
            FinishReason.SUPERSEDED, instead of running twice. Clients that retry choose a key by
            themselves.
        resume: What an earlier process received of this request: its output continues after that,
            and events have what is new. Give the prompt as before, and `request_id`, the seed and
            all other parameters of its `Started`.
    """

    token_ids: Sequence[int] | None
    preset: PresetName | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    seed: int | None
    max_tokens: int | None
    clamp_max_tokens: bool | None
    min_tokens: int | None
    stop: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop: bool | None
    ignore_eos: bool | None
    time_limit_s: float | None
    queue_limit_s: float | None
    request_id: str | None
    n: int | None
    priority: int | None
    tenant: str | None
    cache_salt: str | None
    logprobs: int | None
    logprob_token_ids: Sequence[int] | None
    prompt_logprobs: int | None
    token_bytes: bool | None
    omit_text: bool | None
    omit_token_ids: bool | None
    min_delta_interval_s: float | None
    attempt_key: str | None
    resume: Sequence[PriorOutput] | None


SAMPLING_PRESETS: Mapping[PresetName, Mapping[str, float]] = {
    "code": {"temperature": 0.2, "repetition_penalty": 1.0},
    "summary": {"temperature": 0.3, "repetition_penalty": 1.1},
    "chat": {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1},
    "creative": {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.0},
}
"""
Options that each preset sets. Source: the ranges in vLLM's tuning guide: temperature 0 to 0.2 for
code, 0.2 to 0.5 for a summary, 0.7 for a chat (repetition_penalty 1.1 to 1.2), 0.8 to 1.2 for
creative text.
"""

BOTH_CHANGED = "temperature and top_p are both set: change one of them at a time, rather than both"
"""Warning for a user that sets both explicitly; a preset may set both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedParams:
    """
    Parameters of a request with all defaults filled in, as one flat view; given as options, they
    reproduce the output.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int
    max_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    n: int
    priority: int
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_p: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    include_stop: bool = False
    clamp_max_tokens: bool = False
    logprobs: int | None = None


_PARAM_NAMES = frozenset(one.name for one in fields(ResolvedParams))


def changes_both(options: Mapping[str, Any]) -> bool:
    """Return True if temperature and top_p are both set to other values than 1, the neutral one."""
    temperature, top_p = options.get("temperature"), options.get("top_p")
    return temperature not in (None, 1.0) and top_p not in (None, 1.0)


def params_from_proto(
    sampling: request_pb2.SamplingParams,
    stopping: request_pb2.StoppingParams,
    *,
    n: int = 1,
    priority: int = 0,
    logprobs: int | None = None,
) -> ResolvedParams:
    """Decode the parameters in force, each under its own name."""
    values: dict[str, Any] = {
        param.name: _plain(getattr(message, param.name))
        for message in (sampling, stopping)
        for param in message.DESCRIPTOR.fields
        if param.name in _PARAM_NAMES
    }
    return ResolvedParams(**values, n=n, priority=priority, logprobs=logprobs)


def _plain(value: Any) -> Any:
    """Return a field's value without protobuf."""
    if isinstance(value, Mapping):
        return dict(value)
    return value if isinstance(value, str | int | float) else tuple(value)
