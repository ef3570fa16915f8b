"""Keyword arguments of a completion, or of a question about tokens, and their messages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from tandem.errors import InvalidParameter
from tandem.inference.v1 import inference_service_pb2 as inference
from tandem.inference.v1 import request_pb2, tokens_pb2
from tandem.wording import nearest
from tandem_client.params import (
    SAMPLING_PRESETS,
    GenerateOptions,
    PriorOutput,
    PromptOptions,
    TokenizeOptions,
)
from tandem_client.request.chat import set_chat
from tandem_client.request.fields import listed, set_field

_NAMES_BY_PART = {
    "sampling": tuple(request_pb2.SamplingParams.DESCRIPTOR.fields_by_name),
    "stopping": tuple(request_pb2.StoppingParams.DESCRIPTOR.fields_by_name),
    "response": tuple(request_pb2.ResponseOptions.DESCRIPTOR.fields_by_name),
}
"""Options that are fields of a part of the request, by the name of the part."""
_PLAIN = (
    "request_id",
    "model",
    "parse_special_tokens",
    "n",
    "priority",
    "tenant",
    "cache_salt",
    "time_limit_s",
    "queue_limit_s",
    "attempt_key",
)
"""Options that are fields of the request itself."""
_OF_CHATS = ("tools", "template_args", "add_generation_prompt", "continue_final_message")
"""Options that have a meaning with `messages` only."""
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
    "include_stop_str_in_output": "include_stop",
    "repeat_penalty": "repetition_penalty",
    "timeout": "deadline_s",
    "timeout_s": "deadline_s",
    "user": "tenant",
    "idempotency_key": "attempt_key",
    "chat_template_kwargs": "template_args",
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
    _refuse_unknown(options, GenerateOptions.__annotations__)
    request = inference.GenerateRequest()
    _set_prompt(request, prompt, options)
    given = dict(_preset_of(options))
    given |= {name: value for name, value in options.items() if value is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    for part, names in _NAMES_BY_PART.items():
        for name in names:
            if name in given:
                set_field(getattr(request, part), f"{part}.{name}", name, given[name])
    for name in _PLAIN:
        if name in given:
            set_field(request, name, name, given[name])
    if "resume" in given:
        _set_resume(request, given["resume"])
    return request


def tokenize_request(prompt: str | None, options: TokenizeOptions) -> tokens_pb2.TokenizeRequest:
    """
    Build the message of a question about the tokens of a prompt, as `build_request` does.

    Raises:
        TypeError: An option has an unknown name.
        InvalidParameter: Not exactly one of prompt and messages is given, or a value has the wrong
            type.
    """
    _refuse_unknown(options, TokenizeOptions.__annotations__)
    request = tokens_pb2.TokenizeRequest()
    _set_prompt(request, prompt, options)
    for name in ("model", "parse_special_tokens", "with_texts"):
        if options.get(name) is not None:
            set_field(request, name, name, options.get(name))
    return request


def detokenize_request(
    token_ids: Sequence[int], keep_special_tokens: bool, model: str | None
) -> tokens_pb2.DetokenizeRequest:
    """
    Build the message of a question about the text of ids.

    Raises:
        InvalidParameter: The ids cannot be sent.
    """
    request = tokens_pb2.DetokenizeRequest(model=model)
    set_field(request, "token_ids", "token_ids", listed("token_ids", token_ids, path="token_ids"))
    if keep_special_tokens:
        request.keep_special_tokens = True
    return request


def _preset_of(options: GenerateOptions) -> Mapping[str, Any]:
    name = options.get("preset")
    if name is None:
        return {}
    if not isinstance(name, str) or name not in SAMPLING_PRESETS:
        names = ", ".join(SAMPLING_PRESETS)
        raise InvalidParameter(f"unknown preset {name!r}; presets: {names}", field="preset")
    return SAMPLING_PRESETS[name]


def _set_resume(request: inference.GenerateRequest, held: object) -> None:
    request.resume.SetInParent()
    for at, prior in enumerate(listed("resume", held, path="resume")):
        path = f"resume.choices[{at}]"
        if not isinstance(prior, Mapping):
            raise InvalidParameter(
                f"resume must be a list of dicts, not of {type(prior).__name__}", field=path
            )
        for name in prior.keys() - PriorOutput.__annotations__.keys():
            raise InvalidParameter(
                f"resume has no {name!r}: see tandem_client.PriorOutput", field=path
            )
        choice = request.resume.choices.add()
        for name, value in prior.items():
            field = f"{path}.{name}"
            given = listed(name, value, path=field) if name == "token_ids" else value
            set_field(choice, field, name, given)


def _refuse_unknown(names: Iterable[str], options: Collection[str]) -> None:
    known = {*options, "deadline_s"}
    for name in names:
        if name not in known:
            meant = _ELSEWHERE.get(name)
            if meant not in known:
                meant = nearest(name, known)
            hint = f". Did you mean {meant!r}?" if meant else ": see tandem_client.GenerateOptions"
            raise TypeError(f"unexpected keyword argument {name!r}{hint}")


def _set_prompt(
    request: inference.GenerateRequest | tokens_pb2.TokenizeRequest,
    prompt: object,
    options: PromptOptions | GenerateOptions,
) -> None:
    takes_ids = isinstance(request, inference.GenerateRequest)
    names = ("messages", "token_ids") if takes_ids else ("messages",)
    given = {"prompt": prompt} | {name: options.get(name) for name in names}
    present = [name for name, value in given.items() if value is not None]
    if len(present) != 1:
        kinds = "prompt, messages and token_ids" if takes_ids else "prompt and messages"
        raise InvalidParameter(f"give exactly one of {kinds}, got {len(present)}", field="prompt")
    if present != ["messages"]:
        _refuse_chat_options(options)
    if prompt is not None:
        if not isinstance(prompt, str | bytes):
            raise InvalidParameter(
                f"prompt must be text, not {type(prompt).__name__}{_instead_of(prompt)}",
                field="prompt.text",
            )
        set_field(request, "prompt.text", "text", prompt)
    elif isinstance(request, inference.GenerateRequest) and present == ["token_ids"]:
        path = "prompt.token_ids"
        request.token_ids.SetInParent()
        set_field(
            request.token_ids, path, "ids", listed("token_ids", given["token_ids"], path=path)
        )
    else:
        request.chat.SetInParent()
        set_chat(request.chat, options)


def _refuse_chat_options(options: PromptOptions) -> None:
    for name in _OF_CHATS:
        if options.get(name) is not None:
            raise InvalidParameter(
                f"{name} has a meaning for a conversation only: give messages", field=f"chat.{name}"
            )


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
