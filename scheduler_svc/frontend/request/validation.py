"""
Checks of all fields of a request, and the defaults of those that are not set.

Field paths start at GenerateRequest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from scheduler_svc.frontend.request.chat import MESSAGES
from scheduler_svc.frontend.request.response import check_response
from scheduler_svc.frontend.request.sampling import check_sampling, resolve_sampling
from scheduler_svc.ipc.messages import Model
from tandem.errors import EmptyPrompt, InvalidModel, InvalidParameter
from tandem.inference.v1 import inference_service_pb2, request_pb2
from tandem.link.batch import Int32Column
from tandem.sampling_params import SamplingParams

MAX_REQUEST_ID_CHARS = 128
MAX_TENANT_CHARS = 128
MAX_ATTEMPT_KEY_CHARS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_ALLOWED_IDS = 1024
MAX_CHOICES = 16
MAX_CACHE_SALT_BYTES = 256
MAX_SCORES = 1 << 18
"""Most prompt tokens times log probabilities of each, which bounds what one request is told."""
MIN_LIMIT_S = 0.001
"""Shortest time limit of a request, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedParams:
    """
    Parameters of one request with defaults applied, all within their ranges.

    `max_tokens` is None if the default applies, which depends on the prompt's length.
    """

    sampling: SamplingParams
    max_tokens: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    """Empty under `ignore_eos`."""
    time_limit_s: float | None
    queue_limit_s: float | None
    num_choices: int


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
    check_sampling(request, model.vocab_size)
    stopping = request.stopping
    _check_max_tokens(request)
    _check_stopping(stopping, model, "stopping.")
    eos_token_ids = () if stopping.ignore_eos else model.eos_token_ids
    stop_token_ids = tuple(stopping.stop_token_ids)
    sampling = resolve_sampling(
        request, model.default_sampling, (*eos_token_ids, *stop_token_ids), choose_seed
    )
    check_token_ids(
        request.response.logprob_token_ids, model.vocab_size, field="response.logprob_token_ids"
    )
    check_allowed_ids(
        request.sampling.allowed_token_ids,
        model.vocab_size,
        banned_ids=sampling.end_ids,
        field="sampling.allowed_token_ids",
    )
    num_choices = request.n if request.HasField("n") else 1
    _check_choices(num_choices, sampling.temperature)
    return CheckedParams(
        sampling=sampling,
        max_tokens=stopping.max_tokens if stopping.HasField("max_tokens") else None,
        stop=tuple(stopping.stop),
        stop_token_ids=stop_token_ids,
        eos_token_ids=eos_token_ids,
        time_limit_s=request.time_limit_s if request.HasField("time_limit_s") else None,
        queue_limit_s=request.queue_limit_s if request.HasField("queue_limit_s") else None,
        num_choices=num_choices,
    )


def _check_plain(request: inference_service_pb2.GenerateRequest) -> None:
    """Check the fields that need neither model nor defaults."""
    if request.HasField("request_id"):
        check_request_id(request.request_id)
    if request.HasField("attempt_key"):
        check_name(
            request.attempt_key,
            field="attempt_key",
            at_least=1,
            at_most=MAX_ATTEMPT_KEY_CHARS,
        )
    _check_sharing(request)
    for name in ("time_limit_s", "queue_limit_s"):
        limit_s = getattr(request, name)
        if request.HasField(name) and not MIN_LIMIT_S <= limit_s < math.inf:
            raise InvalidParameter(
                f"{name} must be a finite number of at least {MIN_LIMIT_S:g}, got {limit_s:g}.",
                field=name,
            )
    check_response(request)


def check_name(text: str, *, field: str, at_least: int, at_most: int) -> None:
    """
    Check length and characters of a name; a space is printable, control characters and invisible
    marks of Unicode are not.

    Raises:
        InvalidParameter: The name breaks a rule; the error has the field.
    """
    if not at_least <= len(text) <= at_most:
        how_many = f"{at_least} to {at_most}" if at_least else f"at most {at_most}"
        raise InvalidParameter(
            f"{field} must have {how_many} characters, got {len(text)}.", field=field
        )
    if not text.isprintable():
        at, char = next((at, char) for at, char in enumerate(text) if not char.isprintable())
        raise InvalidParameter(
            f"{field} must have printable characters only, got {char!a} at {at}.", field=field
        )


def check_request_id(request_id: str) -> None:
    """
    Check the id of one request.

    Raises:
        InvalidParameter: No request can have this id.
    """
    check_name(request_id, field="request_id", at_least=1, at_most=MAX_REQUEST_ID_CHARS)


def is_request_id(text: str) -> bool:
    """Return True for a text that can be the id of a request."""
    return 1 <= len(text) <= MAX_REQUEST_ID_CHARS and text.isprintable()


def check_tenant(tenant: str) -> None:
    """
    Check the name of a tenant; an empty one means no tenant.

    Raises:
        InvalidParameter: No tenant can have this name.
    """
    check_name(tenant, field="tenant", at_least=0, at_most=MAX_TENANT_CHARS)


def check_prompt_shape(request: inference_service_pb2.GenerateRequest) -> str:
    """
    Check that there is a prompt, and return the path of its field; `read_chat` checks a chat.

    Raises:
        EmptyPrompt: There is no prompt, or it is empty.
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
    return MESSAGES


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


def check_allowed_ids(
    ids: Sequence[int], vocab_size: int, *, banned_ids: Collection[int], field: str
) -> None:
    """
    Check the only ids that may be drawn; none at all means all.

    Args:
        ids: The ids.
        vocab_size: Size of the vocabulary.
        banned_ids: Ids that must not be drawn at first, under min_tokens.
        field: Path of the field.

    Raises:
        InvalidParameter: There are too many, one is not in the vocabulary, or all are banned.
    """
    if len(ids) > MAX_ALLOWED_IDS:
        raise InvalidParameter(
            f"allowed_token_ids must have at most {MAX_ALLOWED_IDS} ids, got {len(ids)}.",
            field=field,
        )
    check_token_ids(ids, vocab_size, field=field)
    if ids and set(ids) <= set(banned_ids):
        raise InvalidParameter(
            "allowed_token_ids must have an id that does not end the output, since min_tokens is "
            "not 0.",
            field=field,
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


def check_scored_len(num_top: int | None, prompt_len: int) -> None:
    """
    Check that log probabilities of a prompt are not too many to be told.

    Raises:
        InvalidParameter: They are.
    """
    if num_top is not None and prompt_len * (1 + num_top) > MAX_SCORES:
        raise InvalidParameter(
            f"prompt_logprobs of {num_top} is too much for a prompt of {prompt_len} tokens: the "
            f"tokens times one more than it may be at most {MAX_SCORES:,}.",
            field="response.prompt_logprobs",
        )


def _check_max_tokens(request: inference_service_pb2.GenerateRequest) -> None:
    """Check that no output is asked for only where the prompt of one choice is scored."""
    stopping = request.stopping
    if not stopping.HasField("max_tokens") or stopping.max_tokens > 0:
        return
    if not request.response.HasField("prompt_logprobs"):
        raise InvalidParameter("max_tokens must be at least 1, got 0.", field="stopping.max_tokens")
    if request.n > 1:
        raise InvalidParameter(f"n must be 1 where max_tokens is 0, got {request.n}.", field="n")


def _check_stopping(stopping: request_pb2.StoppingParams, model: Model, path: str) -> None:
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
