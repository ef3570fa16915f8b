"""Keyword arguments of a completion and the message they become."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from google.protobuf.descriptor import FieldDescriptor

from tandem.errors import InvalidParameter
from tandem.inference.v1 import inference_service_pb2 as inference
from tandem.inference.v1 import request_pb2
from tandem.wording import nearest

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
"""Ranges of the integer fields of a message; the server may allow less."""

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

_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "seed",
)
_PLAIN = ("request_id", "n", "priority", "tenant", "cache_salt", "logprobs", "idempotency_key")
_STOPPING = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos")
_ELSEWHERE = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "num_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
    "prompt_token_ids": "token_ids",
    "input_ids": "token_ids",
    "num_return_sequences": "n",
    "best_of": "n",
    "top_logprobs": "logprobs",
    "repeat_penalty": "repetition_penalty",
    "timeout": "deadline_s",
    "timeout_s": "deadline_s",
    "user": "tenant",
}
"""Names of options in other libraries, and our names for the same options."""


def build_request(prompt: str | None, options: GenerateOptions) -> inference.GenerateRequest:
    """
    Build the message of one completion. The server checks ranges; only values that the message
    cannot carry are refused here.

    Raises:
        TypeError: An option has an unknown name.
        InvalidParameter: Not exactly one of prompt, messages and token_ids is given, the preset is
            unknown, or a value has the wrong type.
    """
    _refuse_unknown(options)
    request = inference.GenerateRequest()
    _set_prompt(request, prompt, options)
    given = dict(_preset_of(options))
    given |= {name: value for name, value in options.items() if value is not None}
    sampling = {name: given[name] for name in _SAMPLING if name in given}
    stopping = {name: given[name] for name in _STOPPING if name in given}
    if isinstance(stopping.get("stop"), str):
        stopping["stop"] = [stopping["stop"]]
    for name, value in sampling.items():
        _set(request.sampling, f"sampling.{name}", name, value)
    for name, value in stopping.items():
        _set(request.stopping, f"stopping.{name}", name, value)
    if "time_limit_s" in given:
        _set(request, "time_limit_ms", "time_limit_ms", _milliseconds(given["time_limit_s"]))
    for name in _PLAIN:
        if name in given:
            _set(request, name, name, given[name])
    return request


def changes_both(options: Mapping[str, Any]) -> bool:
    """Return True if temperature and top_p are both set to other values than 1, the neutral one."""
    temperature, top_p = options.get("temperature"), options.get("top_p")
    return temperature not in (None, 1.0) and top_p not in (None, 1.0)


def _preset_of(options: GenerateOptions) -> Mapping[str, Any]:
    name = options.get("preset")
    if name is None:
        return {}
    if not isinstance(name, str) or name not in SAMPLING_PRESETS:
        names = ", ".join(SAMPLING_PRESETS)
        raise InvalidParameter(f"unknown preset {name!r}; presets: {names}", field="preset")
    return SAMPLING_PRESETS[name]


def _refuse_unknown(names: Iterable[str]) -> None:
    known = {*GenerateOptions.__annotations__, "deadline_s"}
    for name in names:
        if name not in known:
            meant = _ELSEWHERE.get(name) or nearest(name, known)
            hint = f". Did you mean {meant!r}?" if meant else ": see tandem_client.GenerateOptions"
            raise TypeError(f"unexpected keyword argument {name!r}{hint}")


def _milliseconds(limit_s: Any) -> int:
    try:
        return round(float(limit_s) * 1000)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidParameter(
            f"time_limit_s must be a number of seconds, not {limit_s!r}", field="time_limit_ms"
        ) from error


def _set_prompt(
    request: inference.GenerateRequest, prompt: object, options: GenerateOptions
) -> None:
    messages, token_ids = options.get("messages"), options.get("token_ids")
    given = [value for value in (prompt, messages, token_ids) if value is not None]
    if len(given) != 1:
        raise InvalidParameter(
            f"give exactly one of prompt, messages and token_ids, got {len(given)}", field="prompt"
        )
    if prompt is not None:
        if not isinstance(prompt, str | bytes):
            raise InvalidParameter(
                f"prompt must be text, not {type(prompt).__name__}{_instead_of(prompt)}",
                field="prompt.text",
            )
        _set(request, "prompt.text", "text", prompt)
    elif token_ids is not None:
        request.token_ids.SetInParent()
        _set(request.token_ids, "prompt.token_ids", "ids", _listed("token_ids", token_ids))
    else:
        request.chat.SetInParent()
        for index, message in enumerate(_listed("messages", messages)):
            if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
                raise InvalidParameter(
                    f"messages[{index}] must have exactly the keys role and content",
                    field=f"chat.messages[{index}]",
                )
            _append(request.chat, index, message)


def _instead_of(prompt: object) -> str:
    """Return a hint that names the option for such a value, or "" if no option takes it."""
    if not isinstance(prompt, Iterable) or isinstance(prompt, Mapping):
        return ""
    is_chat = any(isinstance(one, Mapping) for one in prompt)
    return (
        "; pass a conversation as messages=[...]"
        if is_chat
        else ("; pass ids as token_ids=[...], and texts one by one")
    )


def _listed(name: str, values: Any) -> list[Any]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise InvalidParameter(
            f"{name} must be a list, not {type(values).__name__}", field=f"prompt.{name}"
        )
    return list(values)


def _append(chat: request_pb2.ChatMessages, index: int, message: Mapping[str, str]) -> None:
    turn = chat.messages.add()
    for name in ("role", "content"):
        _set(turn, f"chat.messages[{index}].{name}", name, message[name])


def _set(message: Any, path: str, name: str, value: Any) -> None:
    try:
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            getattr(message, name).extend(value)
        elif isinstance(value, Mapping):
            getattr(message, name).update(value)
        else:
            setattr(message, name, value)
    except UnicodeError as error:
        raise InvalidParameter(f"{name} is not valid UTF-8 text", field=path) from error
    except (TypeError, ValueError, AttributeError) as error:
        why = _range_left(message, name, value) or f"{name} cannot be sent: {error}"
        raise InvalidParameter(why, field=path) from error


def _range_left(message: Any, name: str, value: Any) -> str | None:
    """Return a sentence with the range of an integer field if the value is outside it, or None."""
    bounds = _INTEGERS.get(message.DESCRIPTOR.fields_by_name[name].cpp_type)
    if not isinstance(value, int) or bounds is None or bounds[0] <= value <= bounds[1]:
        return None
    return f"{name} must be in {bounds[0]} to {bounds[1]}, not {value}"
