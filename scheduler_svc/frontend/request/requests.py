"""Preparation of a client's request: the Submit for the core and the start of its stream."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from scheduler_svc.core.request.block_hashes import block_digests
from scheduler_svc.frontend.request.lengths import (
    DEFAULT_MAX_TOKENS,
    Fit,
    check_prompt_len,
    fit_lengths,
    longest_prompt,
    longest_total,
)
from scheduler_svc.frontend.request.resume import ChoiceStart, Prior, check_resume, start_choices
from scheduler_svc.frontend.request.validation import (
    CheckedParams,
    check_min_tokens,
    check_params,
    check_prompt_shape,
    check_token_ids,
    check_tokenizer_fits,
)
from scheduler_svc.frontend.text.detokenizer import Detokenizer
from scheduler_svc.frontend.text.output import OutputText
from scheduler_svc.frontend.text.served_model import LoadedModel
from scheduler_svc.frontend.text.tokenizer_threads import TokenizerThreads
from scheduler_svc.ipc.messages import Model, Submit
from tandem.inference.v1 import stream_pb2
from tandem.inference.v1.inference_service_pb2 import GenerateRequest
from tandem.inference.v1.request_pb2 import ResolvedParams
from tandem.link.batch import Int32Column

INLINE_TEXT_CHARS = 2000
"""Longest text that is tokenized on the event loop, cheaper than handing it to a thread."""
INLINE_DIGEST_TOKENS = 4096
"""Longest prompt that is hashed on the event loop, for the same reason."""
INLINE_PRIOR_TOKENS = 1000
"""Most tokens of resumed outputs that are detokenized on the event loop, for the same reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """Checked request, ready to be submitted."""

    request_id: str
    make_submit: Callable[[int], Submit]
    started: stream_pb2.Started
    starts: list[ChoiceStart]
    """Start of each choice's stream."""
    with_logprobs: bool = False
    """True if every token comes with its log probabilities."""


async def prepare_request(
    request: GenerateRequest, loaded: LoadedModel, threads: TokenizerThreads, *, now_s: float
) -> PreparedRequest:
    """
    Check a request, resolve its parameters and tokenize its prompt.

    Args:
        request: The client's request.
        loaded: The served model.
        threads: Threads for long prompts, their digests, and chat templates.
        now_s: Time of arrival.

    Raises:
        TandemError: The request is refused; field paths start at GenerateRequest.
    """
    model = loaded.model
    params = check_params(request, model, choose_seed=lambda: secrets.randbits(64))
    prompt_field = check_prompt_shape(request)
    prompt = await _encode_prompt(request, loaded, threads, prompt_field)
    is_chat = request.HasField("chat")
    fit = fit_lengths(
        len(prompt), params.max_tokens, model, prompt_field=prompt_field, is_chat=is_chat
    )
    check_min_tokens(params.min_tokens, params.max_tokens or fit.max_tokens)
    prompt = prompt[fit.num_dropped :]
    column = np.asarray(prompt, np.int32)
    if not request.HasField("token_ids"):
        check_tokenizer_fits(column, model.vocab_size)
    digests = await _digests(column, params.cache_salt, model, threads)
    priors = check_resume(request, params, vocab_size=model.vocab_size, max_tokens=fit.max_tokens)
    starts = await _starts(priors, params, fit, lambda: loaded.text.detokenizer(prompt), threads)
    request_id = request.request_id or secrets.token_hex(12)
    resolved = _resolved(params, fit.max_tokens)

    def make_submit(stream_id: int) -> Submit:
        return Submit(
            stream_id=stream_id,
            request_id=request_id,
            prompt=column.astype("<i4", copy=False).tobytes(),
            block_digests=digests,
            prior_outputs=_prior_outputs(priors),
            finished_choices=tuple(at for at, start in enumerate(starts) if start.is_over),
            fingerprint=_fingerprint(request, column, resolved, longest_total(model)),
            **_submitted(request, params, fit, model, now_s),
        )

    return PreparedRequest(
        request_id=request_id,
        make_submit=make_submit,
        started=stream_pb2.Started(
            request_id=request_id,
            resolved_params=resolved,
            prompt_tokens=len(prompt),
            model_revision=model.revision,
            truncated_prompt_tokens=fit.num_dropped,
            resumed_tokens=sum(len(prior.token_ids) for prior in priors),
        ),
        starts=starts,
        with_logprobs=params.logprobs is not None,
    )


async def _starts(
    priors: list[Prior],
    params: CheckedParams,
    fit: Fit,
    make_detokenizer: Callable[[], Detokenizer],
    threads: TokenizerThreads,
) -> list[ChoiceStart]:
    """Return the start of each choice, after the output that its client has already."""
    end_token_ids = frozenset((*params.eos_token_ids, *params.stop_token_ids))

    def start() -> list[ChoiceStart]:
        return start_choices(
            priors,
            lambda: OutputText(
                make_detokenizer(),
                stops=params.stop,
                end_token_ids=end_token_ids,
                min_tokens=params.min_tokens,
            ),
            params,
            max_tokens=fit.max_tokens,
            fills_context=fit.fills_context,
        )

    is_short = sum(len(prior.token_ids) for prior in priors) <= INLINE_PRIOR_TOKENS
    return start() if is_short else await threads.run(start)


def _prior_outputs(priors: list[Prior]) -> tuple[bytes, ...]:
    if not any(len(prior.token_ids) for prior in priors):
        return ()
    return tuple(prior.token_ids.astype("<i4", copy=False).tobytes() for prior in priors)


def _fingerprint(
    request: GenerateRequest, prompt: Int32Column, resolved: ResolvedParams, longest: int
) -> bytes:
    """
    Return the hash in which two requests with one idempotency key must agree to be the same.

    It covers the prompt and all parameters that decide the output, without the seed. It leaves out
    a max_tokens that reaches the `longest` total, as that may differ with the next executor. It is
    empty without a key.
    """
    if not request.idempotency_key:
        return b""
    same = ResolvedParams()
    same.CopyFrom(resolved)
    same.ClearField("seed")
    same.ClearField("priority")
    if len(prompt) + resolved.max_tokens >= longest:
        same.ClearField("max_tokens")
    digest = hashlib.sha256(same.SerializeToString(deterministic=True))
    cache_salt = request.cache_salt.encode()
    digest.update(len(cache_salt).to_bytes(4, "little") + cache_salt)
    digest.update(prompt.astype("<i4", copy=False).tobytes())
    return digest.digest()


def _submitted(
    request: GenerateRequest, params: CheckedParams, fit: Fit, model: Model, now_s: float
) -> dict[str, Any]:
    """Return the fields of Submit that are taken over from request, parameters and model."""
    limit_ms = params.time_limit_ms
    return {
        "idempotency_key": request.idempotency_key,
        "is_seed_given": request.sampling.HasField("seed"),
        "max_tokens": fit.max_tokens,
        "fills_context": fit.fills_context,
        "arrival_s": now_s,
        "model_revision": model.revision,
        "digest_block_size": model.block_size,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "seed": params.seed,
        "eos_token_ids": params.eos_token_ids,
        "stop_token_ids": params.stop_token_ids,
        "deadline_s": None if limit_ms is None else now_s + limit_ms / 1000,
        "num_choices": params.num_choices,
        "priority": params.priority,
        "tenant": params.tenant,
        "cache_salt": params.cache_salt,
        "repetition_penalty": params.repetition_penalty,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "min_p": params.min_p,
        "min_tokens": params.min_tokens,
        "logit_bias": params.logit_bias,
        "logprobs": params.logprobs,
    }


def default_params(model: Model) -> ResolvedParams:
    """Return the parameters of a text request that sets none; the seed in them has no meaning."""
    return ResolvedParams(
        temperature=model.default_temperature,
        top_k=max(model.default_top_k, 0),
        top_p=model.default_top_p,
        max_tokens=min(DEFAULT_MAX_TOKENS, model.max_model_len - 1),
        n=1,
        repetition_penalty=model.default_repetition_penalty,
        min_p=model.default_min_p,
    )


async def _encode_prompt(
    request: GenerateRequest, loaded: LoadedModel, threads: TokenizerThreads, prompt_field: str
) -> list[int]:
    model, text = loaded.model, loaded.text
    if request.HasField("token_ids"):
        if not model.truncates:
            num_ids = len(request.token_ids.ids)
            check_prompt_len(num_ids, model.max_model_len, prompt_field=prompt_field)
        ids = list(request.token_ids.ids)
        check_token_ids(ids, model.vocab_size, field=prompt_field)
        return ids
    if request.HasField("chat"):
        messages = [
            {"role": message.role, "content": message.content} for message in request.chat.messages
        ]
        at_least = max(text.min_tokens(message["content"]) for message in messages)
        _check_at_least(at_least, model, prompt_field)
        return await threads.run(
            lambda: text.encode_chat(messages, max_prompt_len=longest_prompt(model))
        )
    _check_at_least(text.min_tokens(request.text), model, prompt_field)
    if len(request.text) <= INLINE_TEXT_CHARS:
        return text.encode_text(request.text)
    return await threads.run(lambda: text.encode_text(request.text))


def _check_at_least(num_tokens: int, model: Model, prompt_field: str) -> None:
    check_prompt_len(num_tokens, longest_prompt(model), prompt_field=prompt_field, is_bound=True)


async def _digests(
    prompt: Int32Column, cache_salt: bytes, model: Model, threads: TokenizerThreads
) -> bytes:
    """Return the digests of the prompt's full blocks; empty if the core needs none."""
    if model.block_size == 0 or len(prompt) < model.block_size:
        return b""
    if len(prompt) <= INLINE_DIGEST_TOKENS:
        return block_digests(prompt, model.block_size, cache_salt)
    return await threads.run(lambda: block_digests(prompt, model.block_size, cache_salt))


def _resolved(params: CheckedParams, max_tokens: int) -> ResolvedParams:
    return ResolvedParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
        max_tokens=max_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        n=params.num_choices,
        priority=params.priority,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        min_p=params.min_p,
        logit_bias=dict(params.logit_bias),
        min_tokens=params.min_tokens,
        logprobs=params.logprobs,
    )
