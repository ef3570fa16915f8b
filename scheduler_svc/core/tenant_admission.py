"""Tokens that a tenant may have, and requests that give their places to a tenant with fewer."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core.queue.tenants import limits_of
from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.state.cell import Cell
from tandem.errors import NeverFits, QueueFull


def check_tokens(cell: Cell, new: NewRequest, queued_tokens: int) -> None:
    """
    Check that a tenant may have a request queue so many tokens, and has tokens of the minute left.

    Raises:
        NeverFits: Its tokens are more than the tenant may ever have.
        QueueFull: The tenant has too many now.
    """
    limits = limits_of(cell.options, new)
    bound = limits.max_queued_tokens
    if bound is not None:
        _check_ever_fits(queued_tokens, "max_tenant_queued_tokens", bound)
        own = cell.queue.fresh_of(new.tenant)
        queued = 0 if own is None else own.num_tokens
        if queued + queued_tokens > bound:
            message = (
                f"{queued} prompt tokens of tenant {new.tenant!r} wait to be computed, this "
                f"request has {queued_tokens} more and max_tenant_queued_tokens is {bound}: try "
                "again when some have been admitted"
            )
            retry_after_s = cell.retry_advice.after_ends(1, cell.now_s)
            metadata = _of("max_tenant_queued_tokens", bound)
            raise QueueFull(message, metadata=metadata, retry_after_s=retry_after_s)
    per_minute = limits.tokens_per_minute
    if per_minute is not None:
        _check_ever_fits(len(new.prompt), "tenant_tokens_per_minute", per_minute)
        wait_s = cell.token_rates.wait_s(new.tenant, len(new.prompt), per_minute, cell.now_s)
        if wait_s > 0:
            message = (
                f"tenant {new.tenant!r} has used up its tokens and tenant_tokens_per_minute is "
                f"{per_minute}: try again in {wait_s:.1f} s, when there are {len(new.prompt)} for "
                "the prompt"
            )
            metadata = _of("tenant_tokens_per_minute", per_minute)
            raise QueueFull(message, metadata=metadata, retry_after_s=wait_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """
    Amounts by which a request is too much for the limits of the whole queue; 0 or less fits.

    Attributes:
        requests: Requests in the system.
        waiting: Requests that wait.
        tokens: Tokens that wait to be computed.
    """

    requests: int
    waiting: int
    tokens: int

    def without(self, request: Request) -> Excess:
        """Return what is too much once a waiting request has gone."""
        return Excess(
            requests=self.requests - 1,
            waiting=self.waiting - 1,
            tokens=self.tokens - request.terms.queued_tokens,
        )

    @property
    def is_any(self) -> bool:
        """True while the request does not fit."""
        return max(self.requests, self.waiting, self.tokens) > 0


def excess_of(cell: Cell, max_num_seqs: int, num_choices: int, queued_tokens: int) -> Excess:
    """Return by how much a request with so many choices and queued tokens is too much now."""
    options, queue = cell.options, cell.queue
    max_waiting, max_tokens = options.max_queued_requests, options.max_queued_tokens
    return Excess(
        requests=len(cell.requests) + num_choices - max_num_seqs,
        waiting=0 if max_waiting is None else len(queue) + num_choices - max_waiting,
        tokens=0 if max_tokens is None else queue.num_fresh_tokens + queued_tokens - max_tokens,
    )


def crowded_out(cell: Cell, new: NewRequest, num_choices: int, excess: Excess) -> list[Request]:
    """
    Return the waiting requests that give their places to a request of a tenant that has fewer, by
    its weight; none where that does not make room enough.

    They are the latest of the tenant with the most waiting, none of better priority, and each goes
    with all its choices; one that ran before stays. (Longest queue drop, as of fair queueing in
    routers: Suter et al., INFOCOM 1998.)
    """
    if not excess.is_any:
        return []
    waiting, longest = cell.queue.fresh_of(new.tenant), cell.queue.longest_of_others(new.tenant)
    if longest is None:
        return []
    own = (num_choices + (0 if waiting is None else len(waiting))) / new.tenant_limits.weight
    leaving: dict[int, Request] = {}
    for request in longest.newest_first():
        if (len(longest) - len(leaving)) / request.new.tenant_limits.weight <= own:
            return []
        family = request.siblings
        if request.number in leaving or request.new.priority < new.priority:
            continue
        if any(one.times.scheduled_s is not None for one in family):
            continue
        for one in family:
            leaving[one.number] = one
            excess = excess.without(one)
        if not excess.is_any:
            return list(leaving.values())
    return []


def crowding_error(cell: Cell, excess: Excess) -> QueueFull:
    """Return the error with which a request ends that gives its place to another tenant's."""
    scarce = {
        "max_num_seqs": excess.requests,
        "max_queued_requests": excess.waiting,
        "max_queued_tokens": excess.tokens,
    }
    limit = next(name for name, amount in scarce.items() if amount > 0)
    message = (
        f"the queue is full ({limit}) and a tenant with fewer waiting requests got this one's "
        "place: try again when some have ended"
    )
    retry_after_s = cell.retry_advice.after_ends(1, cell.now_s)
    return QueueFull(message, metadata={"limit": limit}, retry_after_s=retry_after_s)


def _check_ever_fits(num_tokens: int, limit: str, bound: int) -> None:
    if num_tokens > bound:
        message = (
            f"the prompt has {num_tokens} tokens that count and {limit} is {bound}: shorten the "
            f"prompt or raise {limit}"
        )
        raise NeverFits(message, field="prompt", metadata=_of(limit, bound))


def _of(limit: str, value: int) -> dict[str, str]:
    return {"limit": limit, "value": str(value)}
