"""Parameters of a completion: the options that callers may set, and the values in force."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from tandem.inference.v1 import request_pb2

PresetName = Literal["code", "summary", "chat", "creative"]


class GenerateOptions(TypedDict, total=False):
    """
    Options of a completion. The server chooses the value of an option that is missing.

    Keys:
        messages: A conversation of {"role": ..., "content": ...}, instead of a prompt.
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
        seed: Key of the noise; the same seed and parameters give the same tokens.
        max_tokens: Largest number of output tokens, at least 1; unset, 100 for a text, and for a
            chat the rest of the context.
        min_tokens: Output tokens before which neither EOS nor a stop string ends the output.
        stop: Strings before which the output ends.
        stop_token_ids: Tokens at which the output ends.
        ignore_eos: Continue past end-of-sequence tokens.
        time_limit_s: Seconds after which the output ends, finished or not.
        request_id: Id chosen by the caller, unique among live requests.
        n: Number of completions of the prompt (parallel sampling), 1 to 16; events name the
            `choice` that they belong to.
        priority: Priority in the waiting queue; a lower value goes first.
        tenant: Tenant that the request counts for in limits per tenant.
        cache_salt: Salt of the prefix cache; only requests with the same salt share cached prompts.
        logprobs: Number of likeliest tokens, 0 to 20, that are returned with each token's log
            probability.
        idempotency_key: Key of the request: a request with the same key ends the earlier one
            instead of running twice. Clients that retry choose a key by themselves.
    """

    messages: Sequence[Mapping[str, str]] | None
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
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    time_limit_s: float | None
    request_id: str | None
    n: int | None
    priority: int | None
    tenant: str | None
    cache_salt: str | None
    logprobs: int | None
    idempotency_key: str | None


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
    """Parameters of a request with all defaults filled in; sending them again reproduces it."""

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
    min_tokens: int = 0
    logprobs: int | None = None


def changes_both(options: Mapping[str, Any]) -> bool:
    """Return True if temperature and top_p are both set to other values than 1, the neutral one."""
    temperature, top_p = options.get("temperature"), options.get("top_p")
    return temperature not in (None, 1.0) and top_p not in (None, 1.0)


def params_from_proto(message: request_pb2.ResolvedParams) -> ResolvedParams:
    """Decode the parameters in force."""
    return ResolvedParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        seed=message.seed,
        max_tokens=message.max_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        n=message.n or 1,  # 0 from a server that does not know the field
        priority=message.priority,
        repetition_penalty=message.repetition_penalty or 1.0,  # likewise
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        min_p=message.min_p,
        logit_bias=dict(message.logit_bias),
        min_tokens=message.min_tokens,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )
