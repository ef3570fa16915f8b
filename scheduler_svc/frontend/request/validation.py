"""
Checks of all fields of a request, and the defaults of those that are not set.

Field paths start at GenerateRequest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from scheduler_svc.frontend.request.names import (
    MAX_IDEMPOTENCY_KEY_CHARS,
    check_name,
    check_request_id,
    check_tenant,
)
from scheduler_svc.frontend.request.sampling_checks import (
    check_logit_bias,
    check_sampling,
)
from scheduler_svc.ipc.messages import Model
from tandem.errors import EmptyPrompt, InvalidModel, InvalidParameter
from tandem.inference.v1 import inference_service_pb2, request_pb2
from tandem.link.batch import Int32Column
from tandem.sampling_ranges import MAX_LOGPROBS, MIN_TEMPERATURE

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_CHAT_MESSAGES = 4096
MAX_CHOICES = 16
MAX_CACHE_SALT_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedParams:
    """
    Parameters of one request with defaults applied, all within their ranges.

    `max_tokens` is None if the default applies, which depends on the prompt's length.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int
    max_tokens: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    eos_token_ids: tuple[int, ...]
    time_limit_ms: int | None
    num_choices: int
    priority: int
    tenant: str
    cache_salt: bytes
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None


def check_params(
    request: inference_service_pb2.GenerateRequest,
    model: Model,
    *,
    choose_seed: Callable[[], int],
) -> CheckedParams:
    """
    Check all fields but the prompt, and apply the defaults.

    Args:
        request: The client's request.
        model: The served model, which has the defaults and the vocabulary.
        choose_seed: Called if no seed was sent.

    Raises:
        InvalidParameter: A field is wrong; the error has its path.
    """
    _check_plain(request)
    sampling, stopping = request.sampling, request.stopping
    check_sampling(sampling, "sampling.")
    check_logit_bias(sampling.logit_bias, model.vocab_size, field="sampling.logit_bias")
    _check_stopping(stopping, model, "stopping.")
    temperature = (
        sampling.temperature if sampling.HasField("temperature") else model.default_temperature
    )
    num_choices = request.n if request.HasField("n") else 1
    _check_choices(num_choices, temperature)
    top_k = sampling.top_k if sampling.HasField("top_k") else model.default_top_k
    return CheckedParams(
        temperature=max(temperature, MIN_TEMPERATURE) if temperature > 0 else 0.0,
        top_k=max(top_k, 0),
        top_p=sampling.top_p if sampling.HasField("top_p") else model.default_top_p,
        seed=sampling.seed if sampling.HasField("seed") else choose_seed(),
        max_tokens=stopping.max_tokens if stopping.HasField("max_tokens") else None,
        stop=tuple(stopping.stop),
        stop_token_ids=tuple(stopping.stop_token_ids),
        ignore_eos=stopping.ignore_eos,
        eos_token_ids=() if stopping.ignore_eos else model.eos_token_ids,
        time_limit_ms=request.time_limit_ms if request.HasField("time_limit_ms") else None,
        num_choices=num_choices,
        priority=request.priority,
        tenant=request.tenant,
        cache_salt=request.cache_salt.encode(),
        repetition_penalty=(
            sampling.repetition_penalty
            if sampling.HasField("repetition_penalty")
            else model.default_repetition_penalty
        ),
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        min_p=sampling.min_p if sampling.HasField("min_p") else model.default_min_p,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        min_tokens=stopping.min_tokens,
        logprobs=request.logprobs if request.HasField("logprobs") else None,
    )


def _check_plain(request: inference_service_pb2.GenerateRequest) -> None:
    """Check the fields that need neither model nor defaults."""
    if request.HasField("request_id"):
        check_request_id(request.request_id)
    if request.HasField("idempotency_key"):
        check_name(
            request.idempotency_key,
            field="idempotency_key",
            at_least=1,
            at_most=MAX_IDEMPOTENCY_KEY_CHARS,
        )
    _check_sharing(request)
    if request.HasField("time_limit_ms") and request.time_limit_ms < 1:
        raise InvalidParameter(
            f"time_limit_ms must be at least 1, got {request.time_limit_ms}.",
            field="time_limit_ms",
        )
    if request.HasField("logprobs") and request.logprobs > MAX_LOGPROBS:
        raise InvalidParameter(
            f"logprobs must be in [0, {MAX_LOGPROBS}], got {request.logprobs}.", field="logprobs"
        )


def check_prompt_shape(request: inference_service_pb2.GenerateRequest) -> str:
    """
    Check that there is a prompt, and return the path of its field.

    Raises:
        EmptyPrompt: There is no prompt, or it is empty.
        InvalidParameter: There are over `MAX_CHAT_MESSAGES` messages, or one has no role.
    """
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise EmptyPrompt("a prompt is needed: set text, token_ids or chat.", field="prompt")
    if kind == "text":
        if not request.text:
            raise EmptyPrompt("text must not be empty.", field="text")
        return "text"
    if kind == "token_ids":
        if not request.token_ids.ids:
            raise EmptyPrompt("token_ids must have at least one id.", field="token_ids.ids")
        return "token_ids.ids"
    _check_chat(request.chat, "chat.messages")
    return "chat.messages"


def check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    """
    Check that `min_tokens` is not above `max_tokens`.

    Raises:
        InvalidParameter: It is.
    """
    if min_tokens > max_tokens:
        raise InvalidParameter(
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}.",
            field="stopping.min_tokens",
        )


def check_token_ids(ids: Sequence[int], vocab_size: int, *, field: str) -> None:
    """
    Check that ids are in the vocabulary.

    Raises:
        InvalidParameter: An id is not; the error names the first such id.
    """
    at = _first_outside(ids, vocab_size)
    if at is not None:
        raise InvalidParameter(
            f"token id {ids[at]} is not in the vocabulary, which is 0 to {vocab_size - 1}.",
            field=f"{field}[{at}]",
        )


def check_tokenizer_fits(prompt: Sequence[int] | Int32Column, vocab_size: int) -> None:
    """
    Refuse a prompt with ids beyond the model's vocabulary: some tokenizers have more ids than the
    model's weights.

    Raises:
        InvalidModel: There is such an id, which is a fault of the model's files.
    """
    at = _first_outside(prompt, vocab_size)
    if at is not None:
        raise InvalidModel(
            f"the tokenizer makes token id {prompt[at]} of this prompt, but the model's "
            f"vocabulary is 0 to {vocab_size - 1}: the two do not belong together"
        )


def _first_outside(ids: Sequence[int] | Int32Column, vocab_size: int) -> int | None:
    """Return the index of the first id that is not in [0, vocab_size)."""
    try:
        column = np.asarray(ids, np.int64)
    except OverflowError:  # past int64, which only a caller in this process can pass
        return next(at for at, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
    outside = np.flatnonzero((column < 0) | (column >= vocab_size))
    return int(outside[0]) if len(outside) else None


def _check_sharing(request: inference_service_pb2.GenerateRequest) -> None:
    check_tenant(request.tenant)
    num_bytes = len(request.cache_salt.encode())
    if num_bytes > MAX_CACHE_SALT_BYTES:
        raise InvalidParameter(
            f"cache_salt must have at most {MAX_CACHE_SALT_BYTES} bytes, got {num_bytes}.",
            field="cache_salt",
        )


def _check_choices(num_choices: int, temperature: float) -> None:
    if not 1 <= num_choices <= MAX_CHOICES:
        raise InvalidParameter(f"n must be in [1, {MAX_CHOICES}], got {num_choices}.", field="n")
    if num_choices > 1 and temperature == 0:
        raise InvalidParameter(
            f"n must be 1 when using greedy sampling, got {num_choices}.", field="n"
        )


def _check_stopping(stopping: request_pb2.StoppingParams, model: Model, path: str) -> None:
    if stopping.HasField("max_tokens") and stopping.max_tokens < 1:
        raise InvalidParameter(
            f"max_tokens must be at least 1, got {stopping.max_tokens}.", field=f"{path}max_tokens"
        )
    if len(stopping.stop) > MAX_STOP_STRINGS:
        raise InvalidParameter(
            f"stop must have at most {MAX_STOP_STRINGS} strings, got {len(stopping.stop)}.",
            field=f"{path}stop",
        )
    for at, stop in enumerate(stopping.stop):
        if not stop:
            raise InvalidParameter(
                "stop cannot contain an empty string.", field=f"{path}stop[{at}]"
            )
        num_bytes = len(stop.encode())
        if num_bytes > MAX_STOP_STRING_BYTES:
            raise InvalidParameter(
                f"a stop string must have at most {MAX_STOP_STRING_BYTES} bytes, got {num_bytes}.",
                field=f"{path}stop[{at}]",
            )
    if len(stopping.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidParameter(
            f"stop_token_ids must have at most {MAX_STOP_TOKEN_IDS} ids, "
            f"got {len(stopping.stop_token_ids)}.",
            field=f"{path}stop_token_ids",
        )
    check_token_ids(stopping.stop_token_ids, model.vocab_size, field=f"{path}stop_token_ids")


def _check_chat(chat: request_pb2.ChatMessages, path: str) -> None:
    if not chat.messages:
        raise EmptyPrompt("chat must have at least one message.", field=path)
    if len(chat.messages) > MAX_CHAT_MESSAGES:
        raise InvalidParameter(
            f"chat must have at most {MAX_CHAT_MESSAGES} messages, got {len(chat.messages)}.",
            field=path,
        )
    for at, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidParameter("role must not be empty.", field=f"{path}[{at}].role")
