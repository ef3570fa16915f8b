"""Keyword arguments of a completion and the message they become."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from tandem.errors import InvalidParameter
from tandem.inference.v1 import inference_service_pb2 as inference
from tandem.inference.v1 import request_pb2
from tandem.wording import nearest
from tandem_client.params import SAMPLING_PRESETS, GenerateOptions, ResolvedParams

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
"""Ranges of the integer fields of a message; the server may allow less."""

_SAMPLING = tuple(request_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
_STOPPING = tuple(request_pb2.StoppingParams.DESCRIPTOR.fields_by_name)
_PLAIN = ("request_id", "n", "priority", "tenant", "cache_salt", "logprobs", "idempotency_key")
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


def set_sampling(request: inference.GenerateRequest, params: ResolvedParams) -> None:
    """Have a request run with the sampling params that a server chose before."""
    for param in request_pb2.SamplingParams.DESCRIPTOR.fields:
        if param.message_type is None:  # the only map, logit_bias, has no default
            setattr(request.sampling, param.name, getattr(params, param.name))


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
