"""Which requests the core takes at all; a refused one leaves no trace."""

from __future__ import annotations

from scheduler_svc.core.end_ids import MAX_END_ID
from scheduler_svc.core.geometry import Limits
from scheduler_svc.core.options import OnPressure
from scheduler_svc.core.request import NewRequest, Request
from scheduler_svc.core.state import CoreState
from tandem.errors import (
    DuplicateRequestId,
    EmptyPrompt,
    InvalidParameter,
    MemoryPressure,
    NeverFits,
    PromptTooLong,
    QueueFull,
    TotalTooLong,
)


def check(state: CoreState, new: NewRequest) -> None:
    """
    Say whether a request can be taken now.

    Raises:
        DuplicateRequestId, EmptyPrompt, InvalidParameter, PromptTooLong, TotalTooLong, NeverFits,
        QueueFull or MemoryPressure, in this order.
    """
    if new.request_id in state.by_id:
        message = (
            f"request id {new.request_id!r} is in use: choose another, or wait until that request "
            "has ended"
        )
        raise DuplicateRequestId(message, field="request_id")
    _check_lengths(state.limits, new)
    _check_capacity(state)


def _check_lengths(limits: Limits, new: NewRequest) -> None:
    """
    Say whether a request could ever run to its end.

    Raises:
        EmptyPrompt, InvalidParameter, PromptTooLong, TotalTooLong or NeverFits.
    """
    prompt_len, total_len, longest = (
        len(new.prompt), len(new.prompt) + new.max_tokens, limits.max_model_len
    )  # fmt: skip
    if prompt_len == 0:
        raise EmptyPrompt("the prompt has no token: send at least one", field="prompt")
    if new.max_tokens < 1:
        message = f"max_tokens is {new.max_tokens}: ask for at least 1"
        raise InvalidParameter(message, field="stopping.max_tokens")
    if any(not 0 <= token <= MAX_END_ID for token in new.eos_token_ids | new.stop_token_ids):
        message = f"a stop token id is outside 0 to {MAX_END_ID}: use ids of the model's vocabulary"
        raise InvalidParameter(message, field="stopping.stop_token_ids")
    if prompt_len > longest:
        message = (
            f"the prompt has {prompt_len} tokens and max_model_len is {longest}: shorten the prompt"
        )
        raise PromptTooLong(message, field="prompt", metadata={"limit": "max_model_len"})
    if total_len > longest:
        message = (
            f"prompt ({prompt_len}) plus max_tokens ({new.max_tokens}) is {total_len} tokens and "
            f"max_model_len is {longest}: ask for at most {longest - prompt_len} tokens or shorten "
            "the prompt"
        )
        raise TotalTooLong(
            message, field="stopping.max_tokens", metadata={"limit": "max_model_len"}
        )
    _check_blocks(limits, prompt_len, total_len)


def check_still_fits(limits: Limits, request: Request) -> None:
    """
    Say whether a request that was taken under other limits can run to its end under these.

    Raises:
        PromptTooLong or NeverFits.
    """
    if request.num_known >= limits.max_model_len:
        message = (
            f"request {request.new.request_id} has {request.num_known} tokens and the executor "
            f"that took over has max_model_len {limits.max_model_len}: send it again with a "
            "shorter prompt"
        )
        raise PromptTooLong(message, metadata={"limit": "max_model_len"})
    _check_blocks(limits, request.prompt_len, request.stop_len)


def _check_blocks(limits: Limits, prompt_len: int, total_len: int) -> None:
    num_blocks = limits.blocks_for(total_len)
    if num_blocks > limits.num_blocks:
        message = (
            f"prompt ({prompt_len}) plus output ({total_len - prompt_len}) needs {num_blocks} KV "
            f"blocks of {limits.block_size} tokens and there are {limits.num_blocks}: ask for "
            "fewer tokens or raise max_num_blocks"
        )
        raise NeverFits(message, metadata={"limit": "max_num_blocks"})
    if limits.memory_threshold <= 0.0:
        message = "memory_threshold is 0.0, so no prompt is ever admitted: raise it"
        raise NeverFits(message, metadata={"limit": "memory_threshold"})


def _check_capacity(state: CoreState) -> None:
    limits, pool = state.limits, state.pool
    if len(state.by_id) >= limits.max_num_seqs:
        message = (
            f"{len(state.by_id)} requests are in the system and max_num_seqs is "
            f"{limits.max_num_seqs}: try again when one has ended"
        )
        metadata = {"limit": "max_num_seqs", "value": str(limits.max_num_seqs)}
        raise QueueFull(message, metadata=metadata)
    if state.options.on_pressure is OnPressure.REFUSE and state.under_pressure():
        message = (
            f"{pool.num_used} of {pool.num_blocks} KV blocks are in use and memory_threshold is "
            f"{limits.memory_threshold}: try again when a request has ended"
        )
        metadata = {"limit": "memory_threshold", "value": str(limits.memory_threshold)}
        raise MemoryPressure(message, metadata=metadata)
