"""Preparation of a client's request: the Submit for the core and the start of its stream."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass

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
from scheduler_svc.frontend.request.resume import check_resume, start_choices
from scheduler_svc.frontend.request.sampling import resolved_message
from scheduler_svc.frontend.request.validation import (
    CheckedParams,
    check_min_tokens,
    check_params,
    check_prompt_shape,
    check_token_ids,
    check_tokenizer_fits,
)
from scheduler_svc.frontend.text.detokenizer import Detokenizer
from scheduler_svc.frontend.text.output import ChoiceStart, OutputText
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
    """
    Checked request, ready to be submitted.

    Attributes:
        request: The client's request.
        params: Its parameters, checked and resolved.
        fit: Its lengths.
        model: The model that it was prepared for.
        prompt: Token ids, shape ``[P]``.
        block_digests: Digests of the prompt's full blocks; empty if the core needs none.
        arrival_s: Time of arrival.
        started: The first message of its stream.
        starts: Start of each choice's stream.
    """

    request: GenerateRequest
    params: CheckedParams
    fit: Fit
    model: Model
    prompt: Int32Column
    block_digests: bytes
    arrival_s: float
    started: stream_pb2.Started
    starts: list[ChoiceStart]

    @property
    def request_id(self) -> str:
        """Id that the client or this service chose."""
        return self.started.request_id

    @property
    def with_logprobs(self) -> bool:
        """True if every token comes with its log probabilities."""
        return self.params.sampling.logprobs is not None

    def submit(self, stream_id: int) -> Submit:
        """Return the message for the core; choice i has the stream number `stream_id` + i."""
        request, params, model = self.request, self.params, self.model
        limit_ms = params.time_limit_ms
        return Submit(
            stream_id=stream_id,
            request_id=self.request_id,
            prompt=self.prompt.astype("<i4", copy=False).tobytes(),
            sampling=params.sampling,
            max_tokens=self.fit.max_tokens,
            eos_token_ids=params.eos_token_ids,
            stop_token_ids=params.stop_token_ids,
            arrival_s=self.arrival_s,
            deadline_s=None if limit_ms is None else self.arrival_s + limit_ms / 1000,
            model_revision=model.revision,
            fills_context=self.fit.fills_context,
            num_choices=params.num_choices,
            priority=request.priority,
            tenant=request.tenant,
            cache_salt=request.cache_salt.encode(),
            block_digests=self.block_digests,
            digest_block_size=model.block_size,
            prior_outputs=_prior_outputs(self.starts),
            finished_choices=tuple(at for at, start in enumerate(self.starts) if start.is_over),
            idempotency_key=request.idempotency_key,
            fingerprint=_fingerprint(
                request, self.prompt, self.started.resolved_params, longest_total(model)
            ),
            is_seed_given=request.sampling.HasField("seed"),
        )


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
    check_min_tokens(params.sampling.min_tokens, params.max_tokens or fit.max_tokens)
    prompt = prompt[fit.num_dropped :]
    column = np.asarray(prompt, np.int32)
    if not request.HasField("token_ids"):
        check_tokenizer_fits(column, model.vocab_size)
    digests = await _digests(column, request.cache_salt.encode(), model, threads)
    starts = await _starts(
        request,
        params,
        fit,
        make_detokenizer=lambda: loaded.text.detokenizer(prompt),
        vocab_size=model.vocab_size,
        threads=threads,
    )
    return PreparedRequest(
        request=request,
        params=params,
        fit=fit,
        model=model,
        prompt=column,
        block_digests=digests,
        arrival_s=now_s,
        started=stream_pb2.Started(
            request_id=request.request_id or secrets.token_hex(12),
            resolved_params=_resolved(request, params, fit.max_tokens),
            prompt_tokens=len(prompt),
            model_revision=model.revision,
            truncated_prompt_tokens=fit.num_dropped,
            resumed_tokens=sum(len(start.prior.token_ids) for start in starts),
        ),
        starts=starts,
    )


async def _starts(
    request: GenerateRequest,
    params: CheckedParams,
    fit: Fit,
    *,
    make_detokenizer: Callable[[], Detokenizer],
    vocab_size: int,
    threads: TokenizerThreads,
) -> list[ChoiceStart]:
    """Return the start of each choice, after the output that its client has already."""
    end_token_ids = frozenset((*params.eos_token_ids, *params.stop_token_ids))

    def make_output() -> OutputText:
        return OutputText(
            make_detokenizer(),
            stops=params.stop,
            end_token_ids=end_token_ids,
            min_tokens=params.sampling.min_tokens,
        )

    if not request.HasField("resume"):
        return [ChoiceStart(output=make_output()) for _ in range(params.num_choices)]
    priors = check_resume(request, params, vocab_size=vocab_size, max_tokens=fit.max_tokens)

    def start() -> list[ChoiceStart]:
        return start_choices(
            priors,
            make_output,
            params,
            max_tokens=fit.max_tokens,
            fills_context=fit.fills_context,
        )

    is_short = sum(len(prior.token_ids) for prior in priors) <= INLINE_PRIOR_TOKENS
    return start() if is_short else await threads.run(start)


def _prior_outputs(starts: list[ChoiceStart]) -> tuple[bytes, ...]:
    if not any(len(start.prior.token_ids) for start in starts):
        return ()
    return tuple(start.prior.token_ids.astype("<i4", copy=False).tobytes() for start in starts)


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


def default_params(model: Model) -> ResolvedParams:
    """Return the parameters of a text request that sets none; the seed in them has no meaning."""
    defaults = resolved_message(model.default_sampling)
    defaults.max_tokens = min(DEFAULT_MAX_TOKENS, model.max_model_len - 1)
    defaults.n = 1
    return defaults


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


def _resolved(request: GenerateRequest, params: CheckedParams, max_tokens: int) -> ResolvedParams:
    resolved = resolved_message(params.sampling)
    resolved.max_tokens = max_tokens
    resolved.stop.extend(params.stop)
    resolved.stop_token_ids.extend(params.stop_token_ids)
    resolved.ignore_eos = request.stopping.ignore_eos
    resolved.n = params.num_choices
    resolved.priority = request.priority
    return resolved
