"""A request as its submitter hands it to the core."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core.request.tenant import DEFAULT_TENANT_LIMITS, NO_TENANT, TenantLimits
from tandem.link.batch import Int32Column
from tandem.sampling_params import SamplingParams


def log_ids(request_id: str, trace_id: str) -> dict[str, str]:
    """Return the keys that name a request in a line of the log; `trace_id` is empty for none."""
    ids = {"request_id": request_id}
    if trace_id:
        ids["trace_id"] = trace_id
    return ids


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """
    A request that is to be accepted, validated and resolved by its submitter.

    Attributes:
        request_id: Id of the request, unique among live requests of its tenant.
        handle: The submitter's number for this request; the core returns it with every event.
            int64, at least 0.
        prompt: Token ids, shape ``[P]``, P at least 1.
        sampling: Resolved sampling params.
        max_tokens: Most output tokens; 0 to score the prompt alone, which needs
            `sampling.prompt_logprobs`.
        eos_token_ids: Ids that end it with EOS; empty under ignore_eos.
        stop_token_ids: Ids that end it with STOP_TOKEN.
        arrival_s: Time of its arrival, on the clock the core is driven with.
        deadline_s: Time at which it ends with DEADLINE, same clock; None for never.
        queue_limit_s: Seconds since its arrival within which it must be admitted first, at
            least 1, else it fails with QueueFull; None for any wait.
        give_up_s: Time at which its caller waits no more, same clock; None for never. The core
            refuses a request that it cannot admit by then, and computes nothing for one that it has
            not admitted.
        fills_context: True when `max_tokens` is what the context had left, not a number that the
            user asked for: reaching it is CONTEXT_LIMIT.
        num_choices: Completions of this prompt, at least 1; choice i has handle `handle` + i and
            draws with `sampling.choice` i.
        priority: Priority of the request: lower goes first.
        tenant: Tenant that sent it, for limits and turns of tenants; empty for none.
        tenant_limits: Limits and weight of that tenant, as far as it has its own.
        cache_salt: Salt of its digests: only requests with the same salt share KV.
        block_digests: Digests of the full blocks of the prompt, 32 bytes each, see
            `scheduler_svc.core.request.block_hashes`; empty to have the core compute them.
        prior_outputs: Output tokens that each choice has already, produced by a scheduler that is
            gone, ``num_choices`` columns; empty when none has any. They count as outputs in every
            respect, except that no event repeats them: offsets go on after them.
        finished_choices: Choices that ended on that scheduler: no token is produced for them, and
            no event is about them.
        trace_id: Id of the trace that its call is part of, for lines of the log; empty for none.
    """

    request_id: str
    handle: int
    prompt: Int32Column
    sampling: SamplingParams
    max_tokens: int
    arrival_s: float
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    deadline_s: float | None = None
    queue_limit_s: float | None = None
    give_up_s: float | None = None
    fills_context: bool = False
    num_choices: int = 1
    priority: int = 0
    tenant: str = NO_TENANT
    tenant_limits: TenantLimits = DEFAULT_TENANT_LIMITS
    cache_salt: bytes = b""
    block_digests: bytes = b""
    prior_outputs: tuple[Int32Column, ...] = ()
    finished_choices: frozenset[int] = frozenset()
    trace_id: str = ""

    @property
    def log_ids(self) -> dict[str, str]:
        """Ids for lines of the log about it."""
        return log_ids(self.request_id, self.trace_id)

    @property
    def start_by_s(self) -> float | None:
        """Time by which it must be admitted first; None where it may wait for ever."""
        if self.queue_limit_s is None:
            return self.give_up_s
        limit_s = self.arrival_s + self.queue_limit_s
        return limit_s if self.give_up_s is None else min(limit_s, self.give_up_s)

    @property
    def live_choices(self) -> list[int]:
        """Choices to be produced, ascending."""
        return [i for i in range(self.num_choices) if i not in self.finished_choices]

    @property
    def end_ids(self) -> frozenset[int]:
        """Token ids that end it, with EOS or with STOP_TOKEN."""
        return self.eos_token_ids | self.stop_token_ids
