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
    fit_lengths,
    longest_total,
)
from scheduler_svc.frontend.request.prompt import encode_prompt
from scheduler_svc.frontend.request.response import check_text_options
from scheduler_svc.frontend.request.resume import check_resume, start_choices
from scheduler_svc.frontend.request.sampling import sampling_message
from scheduler_svc.frontend.request.validation import (
    CheckedParams,
    check_min_tokens,
    check_params,
    check_prompt_shape,
    check_scored_len,
    check_tokenizer_fits,
)
from scheduler_svc.frontend.text.detokenizer import Detokenizer
from scheduler_svc.frontend.text.output import ChoiceStart, OutputText
from scheduler_svc.frontend.text.served_model import LoadedModel
from scheduler_svc.frontend.text.tokenizer_threads import TokenizerThreads
from scheduler_svc.ipc.messages import Model, Submit
from tandem.inference.v1 import request_pb2, stream_pb2
from tandem.inference.v1.inference_service_pb2 import GenerateRequest
from tandem.link.batch import Int32Column

SEED_BITS = 53
"""Size of a seed that the server chooses: JavaScript and JSON lose bits of larger numbers."""
INLINE_DIGEST_TOKENS = 4096
"""Longest prompt that is hashed on the event loop, cheaper than handing it to a thread."""
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
        give_up_s: Time of the call's deadline; None for a call without one.
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
    give_up_s: float | None
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

    @property
    def scored_prompt(self) -> list[int] | None:
        """The prompt, if its log probabilities are to be told."""
        asks = self.params.sampling.prompt_logprobs is not None
        return self.prompt.tolist() if asks else None

    def submit(self, stream_id: int) -> Submit:
        """Return the message for the core; choice i has the stream number `stream_id` + i."""
        request, params, model = self.request, self.params, self.model
        limit_s = params.time_limit_s
        return Submit(
            stream_id=stream_id,
            request_id=self.request_id,
            prompt=self.prompt.astype("<i4", copy=False).tobytes(),
            sampling=params.sampling,
            max_tokens=self.fit.max_tokens,
            eos_token_ids=params.eos_token_ids,
            stop_token_ids=params.stop_token_ids,
            arrival_s=self.arrival_s,
            queue_limit_s=params.queue_limit_s,
            give_up_s=self.give_up_s,
            deadline_s=None if limit_s is None else self.arrival_s + limit_s,
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
            attempt_key=request.attempt_key,
            fingerprint=_fingerprint(request, self.prompt, self.started, longest_total(model)),
            is_seed_given=request.sampling.HasField("seed"),
        )


async def prepare_request(
    request: GenerateRequest,
    loaded: LoadedModel,
    threads: TokenizerThreads,
    *,
    request_id: str,
    now_s: float,
    left_s: float | None = None,
) -> PreparedRequest:
    """
    Check a request, resolve its parameters and tokenize its prompt.

    Args:
        request: The client's request.
        loaded: The served model.
        threads: Threads for long prompts, their digests, and chat templates.
        request_id: Id of the request, the client's where it sent one.
        now_s: Time of arrival.
        left_s: Seconds until the call's deadline, if it has one.

    Raises:
        TandemError: The request is refused; field paths start at GenerateRequest.
    """
    model = loaded.model
    params = check_params(request, model, choose_seed=lambda: secrets.randbits(SEED_BITS))
    check_text_options(request.response, has_tokenizer=loaded.text.has_tokenizer)
    prompt_field = check_prompt_shape(request)
    prompt = await encode_prompt(request, loaded, threads, tenant=request.tenant)
    fit = _fit(request, params, model, len(prompt), prompt_field)
    prompt = prompt[fit.num_dropped :]
    column = _column(prompt, request, model)
    digests = await _digests(column, request, model, threads)
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
        give_up_s=None if left_s is None else now_s + left_s,
        started=stream_pb2.Started(
            request_id=request_id,
            prompt_tokens=len(prompt),
            truncated_prompt_tokens=fit.num_dropped,
            resumed_tokens=sum(len(start.prior.token_ids) for start in starts),
            model=model.name,
            model_revision=model.revision,
            **_settled(request, params, fit),
        ),
        starts=starts,
    )


def _column(prompt: list[int], request: GenerateRequest, model: Model) -> Int32Column:
    column = np.asarray(prompt, np.int32)
    if not request.HasField("token_ids"):
        check_tokenizer_fits(column, model.vocab_size)
    return column


def _fit(
    request: GenerateRequest, params: CheckedParams, model: Model, prompt_len: int, field: str
) -> Fit:
    fit = fit_lengths(
        prompt_len,
        params.max_tokens,
        model,
        prompt_field=field,
        is_chat=request.HasField("chat"),
        clamps=request.stopping.clamp_max_tokens,
    )
    check_min_tokens(params.sampling.min_tokens, params.max_tokens or fit.max_tokens)
    check_scored_len(params.sampling.prompt_logprobs, prompt_len - fit.num_dropped)
    return fit


def _settled(request: GenerateRequest, params: CheckedParams, fit: Fit) -> dict[str, Any]:
    """Return the fields of Started that are the request's own, with every default filled in."""
    return {
        "sampling": sampling_message(params.sampling),
        "stopping": _stopping_message(request, params, fit),
        "response": request.response,
        "n": params.num_choices,
        "priority": request.priority,
    }


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
    includes_stop = request.stopping.include_stop
    ends = () if includes_stop else (*params.eos_token_ids, *params.stop_token_ids)
    tokens_without_text = frozenset(ends)

    def make_output() -> OutputText:
        return OutputText(
            make_detokenizer(),
            stops=params.stop,
            end_token_ids=tokens_without_text,
            includes_stop=includes_stop,
            min_tokens=params.sampling.min_tokens,
            tells_bytes=request.response.token_bytes,
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
    return start() if is_short else await threads.run(start, tenant=request.tenant)


def _prior_outputs(starts: list[ChoiceStart]) -> tuple[bytes, ...]:
    if not any(len(start.prior.token_ids) for start in starts):
        return ()
    return tuple(start.prior.token_ids.astype("<i4", copy=False).tobytes() for start in starts)


def _fingerprint(
    request: GenerateRequest, prompt: Int32Column, started: stream_pb2.Started, longest: int
) -> bytes:
    """
    Return the hash in which two requests with one attempt key must agree to be the same.

    It covers the prompt and all parameters that decide the output, without the seed. It leaves out
    a max_tokens that reaches the `longest` total, as that may differ with the next executor. It is
    empty without a key.
    """
    if not request.attempt_key:
        return b""
    same = stream_pb2.Started(
        sampling=started.sampling,
        stopping=started.stopping,
        response=started.response,
        n=started.n,
    )
    same.sampling.ClearField("seed")
    same.stopping.ClearField("clamp_max_tokens")
    if len(prompt) + started.stopping.max_tokens >= longest:
        same.stopping.ClearField("max_tokens")
    digest = hashlib.sha256(same.SerializeToString(deterministic=True))
    cache_salt = request.cache_salt.encode()
    digest.update(len(cache_salt).to_bytes(4, "little") + cache_salt)
    digest.update(prompt.astype("<i4", copy=False).tobytes())
    return digest.digest()


def default_stopping(model: Model) -> request_pb2.StoppingParams:
    """Return what a text request that sets no stopping params runs with."""
    return request_pb2.StoppingParams(
        max_tokens=min(DEFAULT_MAX_TOKENS, model.max_model_len - 1),
        ignore_eos=False,
        min_tokens=0,
        clamp_max_tokens=False,
        include_stop=False,
    )


def default_sampling(model: Model) -> request_pb2.SamplingParams:
    """Return what a request that sets no sampling params runs with; without a seed."""
    defaults = sampling_message(model.default_sampling)
    defaults.ClearField("seed")
    return defaults


def _stopping_message(
    request: GenerateRequest, params: CheckedParams, fit: Fit
) -> request_pb2.StoppingParams:
    """
    Return the stopping params as the client is told them, every field set. Sent again, they give
    the same end: where the context ends the output, `clamp_max_tokens` says so.
    """
    return request_pb2.StoppingParams(
        max_tokens=fit.max_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=request.stopping.ignore_eos,
        min_tokens=params.sampling.min_tokens,
        clamp_max_tokens=fit.fills_context or request.stopping.clamp_max_tokens,
        include_stop=request.stopping.include_stop,
    )


async def _digests(
    prompt: Int32Column, request: GenerateRequest, model: Model, threads: TokenizerThreads
) -> bytes:
    """Return the digests of the prompt's full blocks; empty if the core needs none."""
    if model.block_size == 0 or len(prompt) < model.block_size:
        return b""
    cache_salt = request.cache_salt.encode()
    if len(prompt) <= INLINE_DIGEST_TOKENS:
        return block_digests(prompt, model.block_size, cache_salt)
    return await threads.run(
        lambda: block_digests(prompt, model.block_size, cache_salt), tenant=request.tenant
    )
