"""
Acceptance checks: a request is accepted, perhaps truncated, or refused with an error.

The core keeps nothing of a refused request. Admission to a slot is `batch.prefill_admission`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduler_svc.core.batch.parallel_sampling import choices_of
from scheduler_svc.core.deadlines import check_in_time
from scheduler_svc.core.queue.tenants import limits_of
from scheduler_svc.core.request.geometry import Limits
from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.options import CoreOptions, OnPressure, Overlength
from scheduler_svc.core.request.prior_outputs import check_prior_lengths, check_prior_outputs
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.request.truncation import num_to_drop
from scheduler_svc.core.slots.end_ids import MAX_END_ID
from scheduler_svc.core.state.cell import Cell
from scheduler_svc.core.state.ends import fail, finish_if_over
from scheduler_svc.core.state.fleet import Fleet
from scheduler_svc.core.tenant_admission import (
    check_tokens,
    crowded_out,
    crowding_error,
    excess_of,
)
from tandem.errors import (
    DuplicateRequestId,
    EmptyPrompt,
    FeatureUnsupported,
    InvalidParameter,
    MemoryPressure,
    NeverFits,
    PromptTooLong,
    QueueFull,
    TandemError,
    TotalTooLong,
)
from tandem.wording import counted

NO_PROMPT_LOGPROBS = (
    "Prompt log probs cannot be calculated if only last token logits are materialized. Set "
    "materialize_only_last_token_logits to False in DynamicInferenceContext or "
    "skip_prompt_log_probs to True in SamplingParams."
)
"""The text is Megatron Core's, whose users know it."""
MIN_PRIORITY, MAX_PRIORITY = -(1 << 31), (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """
    Terms on which a request was accepted.

    Attributes:
        num_truncated_tokens: Number of oldest prompt tokens that were cut; always 0 unless
            overlength=truncate.
        max_tokens: Most output tokens of each choice; overlength=truncate may have lowered it.
    """

    num_truncated_tokens: int
    max_tokens: int


def check(fleet: Fleet, new: NewRequest) -> list[Request]:
    """
    Check that a request can be accepted now; returns the choices to be produced, at least one,
    truncated to what fits under overlength=truncate.

    Raises:
        DuplicateRequestId, EmptyPrompt, InvalidParameter, FeatureUnsupported, PromptTooLong,
        TotalTooLong, NeverFits, QueueFull or MemoryPressure, in this order.
    """
    cell = fleet.cell
    if cell.requests.has(new.tenant, new.request_id):
        message = (
            f"request id {new.request_id!r} is in use: choose another, or wait until that request "
            "has ended"
        )
        raise DuplicateRequestId(message, field="request_id")
    _check_parameters(new)
    _check_features(cell.options, new)
    limits, whole_len = fleet.largest.limits, len(new.prompt)
    # Where not even two tokens fit, truncation does not help.
    if cell.options.overlength is Overlength.TRUNCATE and limits.longest > 1:
        new = _truncated(limits, new)
        total_len = min(len(new.prompt) + new.max_tokens, limits.longest)
    else:
        total_len = len(new.prompt) + new.max_tokens
        _check_lengths(limits, len(new.prompt), new.max_tokens)
    _check_blocks(limits, len(new.prompt), total_len)
    check_prior_lengths(new, total_len - len(new.prompt))
    choices = choices_of(
        new,
        stop_len=total_len,
        first_number=cell.requests.next_number,
        num_truncated_tokens=whole_len - len(new.prompt),
    )
    _check_family(fleet, new, len(choices))
    queued_tokens = _count_queued_tokens(fleet, choices)
    _check_capacity(fleet, new, len(choices), queued_tokens)
    check_tokens(cell, new, queued_tokens)
    check_in_time(cell, new)
    return choices


def accept(fleet: Fleet, choices: list[Request], now: float) -> Acceptance:
    """
    Put the checked choices of a request in the waiting queue; a choice ends at once if its prior
    outputs already reach its end. Returns the terms on which the request was accepted.

    Where the queue is full, requests of a tenant with more waiting ones end for it with QueueFull.
    """
    cell, new = fleet.cell, choices[0].new
    queued_tokens = sum(choice.terms.queued_tokens for choice in choices)
    excess = excess_of(cell, fleet.largest.limits.max_num_seqs, len(choices), queued_tokens)
    for request in crowded_out(cell, new, len(choices), excess):
        fail(cell, request, crowding_error(cell, excess))
    cell.spend_tokens(new, len(new.prompt))
    for choice in choices:
        cell.accept(choice)
    fleet.route(choices)
    if cell.options.priority_preemption:
        cell.reopen()
    for choice in choices:
        if choice.terms.num_prior:
            finish_if_over(cell, choice, choice.outputs[-1], len(choice.outputs), now)
    first = choices[0]
    return Acceptance(
        num_truncated_tokens=first.terms.num_truncated_tokens,
        max_tokens=first.terms.longest - first.prompt_len,
    )


def fail_misfits(fleet: Fleet) -> None:
    """Shorten waiting requests to fit the largest executor, and fail those that it cannot hold."""
    limits = fleet.largest_expected.limits
    for request in list(fleet.cell.queue):
        request.terms.shorten(limits.max_model_len)
        try:
            _check_still_fits(limits, request)
        except TandemError as error:
            fail(fleet.cell, request, error)


def _check_still_fits(limits: Limits, request: Request) -> None:
    """
    Check that a request accepted under other limits can run to its end under these.

    Raises:
        PromptTooLong or NeverFits.
    """
    if request.num_known >= limits.max_model_len + request.terms.num_unfilled:
        message = (
            f"request {request.new.request_id} has {request.num_known} tokens and the executor "
            f"that took over has max_model_len {limits.max_model_len}: send it again with a "
            "shorter prompt"
        )
        raise PromptTooLong(message, metadata=_of("max_model_len", limits.max_model_len))
    _check_blocks(limits, request.prompt_len, request.terms.longest)


def _check_parameters(new: NewRequest) -> None:
    if len(new.prompt) == 0:
        raise EmptyPrompt("the prompt has no token: send at least one", field="prompt")
    _check_scoring(new)
    if any(not 0 <= token <= MAX_END_ID for token in new.end_ids):
        message = f"a stop token id is outside 0 to {MAX_END_ID}: use ids of the model's vocabulary"
        raise InvalidParameter(message, field="stopping.stop_token_ids")
    if new.num_choices < 1:
        message = f"n is {new.num_choices}: ask for at least 1 choice"
        raise InvalidParameter(message, field="n")
    if not MIN_PRIORITY <= new.priority <= MAX_PRIORITY:
        message = f"priority is {new.priority}: it must be from {MIN_PRIORITY} to {MAX_PRIORITY}"
        raise InvalidParameter(message, field="priority")
    check_prior_outputs(new)


def _check_features(options: CoreOptions, new: NewRequest) -> None:
    if options.materialize_only_last_token_logits and new.sampling.prompt_logprobs is not None:
        raise FeatureUnsupported(NO_PROMPT_LOGPROBS, field="response.prompt_logprobs")


def _check_scoring(new: NewRequest) -> None:
    if new.max_tokens < 0:
        message = f"max_tokens is {new.max_tokens}: ask for at least 1"
        raise InvalidParameter(message, field="stopping.max_tokens")
    if new.max_tokens == 0 and (new.sampling.prompt_logprobs is None or new.num_choices > 1):
        message = (
            "max_tokens is 0: ask for at least 1, or for prompt_logprobs with one choice, which "
            "scores the prompt and produces no output"
        )
        raise InvalidParameter(message, field="stopping.max_tokens")


def _check_lengths(limits: Limits, prompt_len: int, max_tokens: int) -> None:
    total_len, longest = prompt_len + max_tokens, limits.max_model_len
    metadata = _of("max_model_len", longest)
    if prompt_len > longest:
        held = counted(prompt_len, "token")
        message = f"the prompt has {held} and max_model_len is {longest}: shorten the prompt"
        raise PromptTooLong(message, field="prompt", metadata=metadata)
    if total_len > longest:
        message = (
            f"prompt ({prompt_len}) plus max_tokens ({max_tokens}) is {total_len} tokens and "
            f"max_model_len is {longest}: ask for at most "
            f"{counted(longest - prompt_len, 'token')} or shorten the prompt"
        )
        raise TotalTooLong(message, field="stopping.max_tokens", metadata=metadata)


def _truncated(limits: Limits, new: NewRequest) -> NewRequest:
    """Return the request without its oldest prompt tokens if its prompt is too long."""
    prompt_len = len(new.prompt)
    fitting = prompt_len - num_to_drop(prompt_len, new.max_tokens, limits.longest)
    kept = min(fitting, _max_prompt_blocks(limits) * limits.block_size)
    if kept == prompt_len or kept < 1:
        return new
    # Its blocks now hold other tokens, so the digests that came with it are of no use.
    return replace(new, prompt=new.prompt[-kept:], block_digests=b"")


def _max_prompt_blocks(limits: Limits) -> int:
    """Return the most blocks a prompt may have: at most the share memory_threshold of all."""
    count = int(limits.memory_threshold * limits.num_blocks)
    # 0.29 * 100 is a little less than 29.
    return count + 1 if (count + 1) / limits.num_blocks <= limits.memory_threshold else count


def _check_blocks(limits: Limits, prompt_len: int, total_len: int) -> None:
    num_blocks = limits.blocks_for(total_len)
    if num_blocks > limits.num_blocks:
        message = (
            f"prompt ({prompt_len}) plus output ({total_len - prompt_len}) needs {num_blocks} KV "
            f"blocks of {limits.block_size} tokens and there are {limits.num_blocks}: ask for "
            "fewer tokens or raise max_num_blocks"
        )
        raise NeverFits(message, metadata=_of("max_num_blocks", limits.num_blocks))
    metadata = _of("memory_threshold", limits.memory_threshold)
    if limits.memory_threshold <= 0.0:
        message = "memory_threshold is 0.0, so no prompt is ever admitted: raise it"
        raise NeverFits(message, metadata=metadata)
    num_blocks, allowed = limits.blocks_for(prompt_len), _max_prompt_blocks(limits)
    if num_blocks > allowed:
        message = (
            f"the prompt ({prompt_len}) needs {num_blocks} KV blocks of {limits.block_size} tokens "
            f"and prompts get at most {allowed} of {limits.num_blocks}, since memory_threshold is "
            f"{limits.memory_threshold}: shorten the prompt, or raise memory_threshold or "
            "max_num_blocks"
        )
        raise NeverFits(message, field="prompt", metadata=metadata)


def _check_family(fleet: Fleet, new: NewRequest, num_choices: int) -> None:
    """Check that all choices together could ever be in the system."""
    options = fleet.cell.options
    bounds = {
        "max_num_seqs": fleet.largest.limits.max_num_seqs,
        "max_queued_requests": options.max_queued_requests,
        "max_tenant_requests": limits_of(options, new).max_requests,
    }
    for name, bound in bounds.items():
        if bound is not None and num_choices > bound:
            message = f"n is {num_choices} and {name} is {bound}: ask for fewer choices"
            raise NeverFits(message, field="n", metadata=_of(name, bound))


def _check_capacity(fleet: Fleet, new: NewRequest, num_choices: int, queued_tokens: int) -> None:
    """
    Check that there is room for all choices now, with so many tokens to compute.

    The limits of the waiting queue hold for every arrival, even where a slot is free: a new request
    waits until the next plan. Requests of a tenant with more waiting ones give way.
    """
    cell = fleet.cell
    limits, options = fleet.largest.limits, cell.options
    num_live, num_waiting = len(cell.requests), len(cell.queue)
    too_much = excess_of(cell, limits.max_num_seqs, num_choices, queued_tokens)
    is_full = too_much.is_any and not crowded_out(cell, new, num_choices, too_much)
    if is_full and (excess := num_live + num_choices - limits.max_num_seqs) > 0:
        message = (
            f"{num_live} requests are in the system and max_num_seqs is {limits.max_num_seqs}: try "
            "again when one has ended (max_num_seqs counts waiting requests too; vLLM's "
            "max_num_seqs is max_batch_size here)"
        )
        raise _full(cell, message, "max_num_seqs", limits.max_num_seqs, excess)
    _check_tenant_requests(cell, new, num_choices)
    bound = options.max_queued_requests
    if is_full and bound is not None and (excess := num_waiting + num_choices - bound) > 0:
        message = (
            f"{num_waiting} requests wait and max_queued_requests is {bound}: try again when some "
            "have been admitted"
        )
        raise _full(cell, message, "max_queued_requests", bound, excess)
    if is_full:
        _check_queued_tokens(cell, queued_tokens)
    if options.on_pressure is OnPressure.REFUSE and fleet.under_pressure():
        pool = fleet.largest.kv.pool
        message = (
            f"{pool.num_used} of {pool.num_blocks} KV blocks are in use and "
            f"memory_threshold is {limits.memory_threshold}: try again when a request has ended"
        )
        raise MemoryPressure(
            message,
            metadata=_of("memory_threshold", limits.memory_threshold),
            retry_after_s=cell.retry_advice.after_ends(1, cell.now_s),
        )


def _check_tenant_requests(cell: Cell, new: NewRequest, num_choices: int) -> None:
    bound = limits_of(cell.options, new).max_requests
    if bound is None:
        return
    num_own = cell.requests.tenants.count(new.tenant)
    if (excess := num_own + num_choices - bound) > 0:
        message = (
            f"tenant {new.tenant!r} has {num_own} requests in the system and "
            f"max_tenant_requests is {bound}: try again when one of them has ended"
        )
        # Only the tenant's own share of all ends makes room for it.
        ends = -(-excess * len(cell.requests) // num_own)
        raise _full(cell, message, "max_tenant_requests", bound, ends)


def _count_queued_tokens(fleet: Fleet, choices: list[Request]) -> int:
    """
    Count the tokens to compute of a request before its first new token: the uncached prompt once,
    the prior outputs of each choice, and at least one token for each choice.

    Raises:
        NeverFits: They are more than max_queued_tokens.
    """
    first = choices[0]
    first.terms.note_queued(first.num_known - fleet.match_len(first))
    for other in choices[1:]:
        other.terms.note_queued(other.terms.num_prior)
    own, bound = sum(c.terms.queued_tokens for c in choices), fleet.cell.options.max_queued_tokens
    if bound is not None and own > bound:
        message = (
            f"{own} tokens of the prompt are to be computed and max_queued_tokens is {bound}: "
            "shorten the prompt or raise max_queued_tokens"
        )
        raise NeverFits(message, field="prompt", metadata=_of("max_queued_tokens", bound))
    return own


def _check_queued_tokens(cell: Cell, own: int) -> None:
    bound, queued = cell.options.max_queued_tokens, cell.queue.num_fresh_tokens
    if bound is None or queued + own <= bound:
        return
    message = (
        f"{queued} prompt tokens wait to be computed, this request has {own} more and "
        f"max_queued_tokens is {bound}: try again when some have been admitted"
    )
    mean = queued / cell.queue.num_fresh
    num_ends = int((queued + own - bound) / mean) + 1
    raise _full(cell, message, "max_queued_tokens", bound, num_ends)


def _full(cell: Cell, message: str, limit: str, value: int, num_ends: int) -> QueueFull:
    """Return the error of a refusal, with advice to retry once this many requests have ended."""
    retry_after_s = cell.retry_advice.after_ends(num_ends, cell.now_s)
    return QueueFull(message, metadata=_of(limit, value), retry_after_s=retry_after_s)


def _of(limit: str, value: float) -> dict[str, str]:
    return {"limit": limit, "value": str(value)}
