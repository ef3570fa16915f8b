"""Options of the core's scheduling that operators can set; capacities are in `geometry.Limits`."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from tandem.errors import InvalidConfig

MAX_WINDOW = 16
"""Most steps in flight; executors advertise how many they accept, Tandem's this many."""
MIN_AGEING_S = 0.001
"""Smallest `ageing_s`, in seconds: the number of a shorter period would mean nothing."""


class OnPressure(enum.StrEnum):
    """Treatment of a request that arrives while KV use is at memory_threshold or over."""

    QUEUE = "queue"
    """It waits."""
    REFUSE = "refuse"
    """It is refused with MemoryPressure."""


class SchedulePolicy(enum.StrEnum):
    """Order in which waiting requests of equal priority are admitted."""

    FCFS = "fcfs"
    """First come, first served."""
    LPM = "lpm"
    """Longest cached prefix first; fcfs while more than 128 requests wait."""
    DFS_WEIGHT = "dfs-weight"
    """Depth first over the tree of shared prefixes, the branch with most requests first."""
    LOF = "lof"
    """Longest requested output first."""
    RANDOM = "random"
    """In the order of a hash of each request's number: fixed, but unrelated to arrival."""


class Routing(enum.StrEnum):
    """Choice of the executor that a waiting request prefers, where there are several."""

    LOAD_BALANCED = "load_balanced"
    """The one with the least to compute before its first token, as each has room."""
    LONGEST_PREFIX = "longest_prefix"
    """The one that was given most of its prompt, weighed against free places."""
    FIRST_PREFIX_BLOCK = "first_prefix_block"
    """The one that was given its prompt's first block last."""
    ROUND_ROBIN = "round_robin"
    """Each in turn."""


class Eviction(enum.StrEnum):
    """Treatment of a full block that has lost its last holder."""

    LRU = "lru"
    """It stays cached until its memory is needed; the least recently used leaf is evicted first."""
    REF_ZERO = "ref_zero"
    """It is free at once."""


class VictimRule(enum.StrEnum):
    """
    Choice of the running request to preempt when blocks run out; under the first two rules so many
    are preempted that 20 tokens are free per row left.
    """

    FEWEST_GENERATED = "fewest_generated"
    """The request with the fewest output tokens; among equals the one with the longest prompt."""
    LAST_ADMITTED = "last_admitted"
    """The request that was admitted last."""
    PAUSED_BUDGET = "paused_budget"
    """
    No request at first: one that lacks a block pauses, and is preempted only when paused requests
    hold more than the budget or no row can run.
    """


class PreemptionMode(enum.StrEnum):
    """
    Way in which a preempted request gets its KV back. The cheaper one depends on the machine, not
    on the request: both cost time proportional to its tokens.
    """

    RECOMPUTE = "recompute"
    SWAP = "swap"
    """From host memory; recomputed where there are too few host blocks."""


class Overlength(enum.StrEnum):
    """Treatment of a request longer than max_model_len."""

    REJECT = "reject"
    TRUNCATE = "truncate"
    """max_tokens is lowered; a prompt that leaves no room for output loses its oldest tokens."""


class StepPriority(enum.StrEnum):
    """Order in which decodes and prefills get a step's token budget."""

    DECODE_FIRST = "decode-first"
    PREFILL_FIRST = "prefill-first"
    """While prompts are to be computed, decodes get what those leave of the token budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreOptions:
    """
    Options of one core; the code that builds a core calls `validate`.

    Attributes:
        schedule_policy: Order of the queue.
        ageing_s: Seconds of waiting that raise a request by one priority level, at least 0.001; a
            request that has waited ten times as long goes ahead of all that have not, in order of
            arrival.
        priority_preemption: A waiting request may take the slot of a running one of worse priority;
            each gives way once at most.
        routing: See `Routing`; without effect where there is one executor.
        prefix_caching_routing_alpha: Weight of the prompt's share against that of free places under
            longest_prefix, 0 to 1; with 1 the prompt alone counts.
        prefix_caching: Share and keep the KV of equal prefixes.
        eviction: See `Eviction`.
        on_pressure: See `OnPressure`.
        overlength: See `Overlength`; what fits is also bounded by the KV memory and, for prompts,
            by memory_threshold.
        max_queued_requests: Most requests that wait; None for no limit but max_num_seqs.
        max_queued_tokens: Most uncached prompt tokens of requests that never ran and wait; None for
            no limit.
        max_tenant_requests: Most requests of one tenant in the system; None for no limit.
        max_tenant_queued_tokens: `max_queued_tokens` of one tenant; None for no limit.
        tenant_tokens_per_minute: Most tokens of prompts and outputs of one tenant in a minute; None
            for no limit. A request needs its prompt's tokens when it is submitted; its outputs are
            counted as they end, and what is too much then delays later requests.
        schedule_conservativeness: Scales the share of max_tokens that running requests are expected
            to use; at least 0. Lower ones admit more and retract more; 0 admits whatever fits now.
        victim_rule: See `VictimRule`.
        paused_budget_blocks: Blocks that paused requests may keep, under PAUSED_BUDGET.
        preemption_mode: See `PreemptionMode`.
        step_priority: See `StepPriority`.
        chunked_prefill: Compute a prompt in several steps where one has no room for all of it. Else
            it waits for a step that has, and nothing overtakes it; max_total_tokens must be at
            least max_model_len then. Once the executor has run out of memory prompts are cut all
            the same.
        chunked_prefill_size: Most prompt tokens one step computes of one request; None for no
            limit but the step's.
        long_prefill_threshold: Prompts with more tokens left than this share this many tokens of a
            step, at most half of it, and leave the rest to shorter ones that need it; None for off.
        max_prefill_share: Largest share of max_total_tokens that goes to prompts while others
            decode, over 0 to 1; at least one token.
        materialize_only_last_token_logits: Compute no logits but those that tokens are sampled
            from: requests for log probabilities of their prompts are refused. Else theirs are
            computed, for those prompts alone.
        window: Most steps sent before the result of the first is back, 1 to 16, for each lane of an
            executor with pipeline stages; see `lookahead`.
        run_ahead: The same of all lanes together while no request waits, memory lasts and steps are
            short, 1 to 16; it has no effect where `window` allows as many.
        track_request_events: Keep what happened to each request for operators.
        track_token_events: Also one event per token.
        track_paused_events: Also one event per request and step that it stays paused.
    """

    schedule_policy: SchedulePolicy = SchedulePolicy.LPM
    ageing_s: float = 5.0
    priority_preemption: bool = False
    routing: Routing = Routing.LOAD_BALANCED
    prefix_caching_routing_alpha: float = 0.5
    prefix_caching: bool = True
    eviction: Eviction = Eviction.LRU
    on_pressure: OnPressure = OnPressure.QUEUE
    overlength: Overlength = Overlength.REJECT
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    max_tenant_requests: int | None = None
    max_tenant_queued_tokens: int | None = None
    tenant_tokens_per_minute: int | None = None
    schedule_conservativeness: float = 1.0
    victim_rule: VictimRule = VictimRule.FEWEST_GENERATED
    paused_budget_blocks: int = 0
    preemption_mode: PreemptionMode = PreemptionMode.RECOMPUTE
    step_priority: StepPriority = StepPriority.DECODE_FIRST
    chunked_prefill: bool = True
    chunked_prefill_size: int | None = None
    long_prefill_threshold: int | None = None
    max_prefill_share: float = 1.0
    materialize_only_last_token_logits: bool = False
    window: int = 2
    run_ahead: int = 4
    track_request_events: bool = False
    track_token_events: bool = False
    track_paused_events: bool = False

    @property
    def decodes_first(self) -> bool:
        """True where decodes get a step's token budget before prefills."""
        return self.step_priority is StepPriority.DECODE_FIRST

    @property
    def tracks_events(self) -> bool:
        """True where any event of requests is kept."""
        return self.track_request_events or self.track_token_events or self.track_paused_events

    def validate(self) -> None:
        """
        Check every range.

        Raises:
            InvalidConfig: A value is out of range; the error names the first one.
        """
        limits = {
            "max_queued_requests": self.max_queued_requests,
            "max_queued_tokens": self.max_queued_tokens,
            "max_tenant_requests": self.max_tenant_requests,
            "max_tenant_queued_tokens": self.max_tenant_queued_tokens,
            "tenant_tokens_per_minute": self.tenant_tokens_per_minute,
            "chunked_prefill_size": self.chunked_prefill_size,
            "long_prefill_threshold": self.long_prefill_threshold,
        }
        for name, value in limits.items():
            if value is not None and value < 1:
                raise InvalidConfig(f"{name} is {value}: it must be at least 1", field=name)
        if not (math.isfinite(self.ageing_s) and self.ageing_s >= MIN_AGEING_S):
            message = f"ageing_s is {self.ageing_s}: it must be finite and at least {MIN_AGEING_S}"
            raise InvalidConfig(message, field="ageing_s")
        conservativeness = self.schedule_conservativeness
        if not (math.isfinite(conservativeness) and conservativeness >= 0):
            raise InvalidConfig(
                f"Invalid schedule_conservativeness: {conservativeness} is not 0 or more",
                field="schedule_conservativeness",
            )
        if self.paused_budget_blocks < 0:
            message = f"paused_budget_blocks is {self.paused_budget_blocks}: it must be at least 0"
            raise InvalidConfig(message, field="paused_budget_blocks")
        if not 0 < self.max_prefill_share <= 1:
            message = f"max_prefill_share is {self.max_prefill_share}: it must be over 0, at most 1"
            raise InvalidConfig(message, field="max_prefill_share")
        if not 0 <= self.prefix_caching_routing_alpha <= 1:
            alpha = self.prefix_caching_routing_alpha
            message = f"prefix_caching_routing_alpha is {alpha}: it must be from 0 to 1"
            raise InvalidConfig(message, field="prefix_caching_routing_alpha")
        self._check_whole_prefills()
        for name, depth in (("window", self.window), ("run_ahead", self.run_ahead)):
            if not 1 <= depth <= MAX_WINDOW:
                message = f"{name} is {depth}: it must be from 1 to {MAX_WINDOW}"
                raise InvalidConfig(message, field=name)

    def check_limits(self, max_total_tokens: int, max_model_len: int) -> None:
        """
        Check that a step has room for the longest sequence, where prompts are computed whole.

        Raises:
            InvalidConfig: A step has no room for it.
        """
        if not self.chunked_prefill and max_total_tokens < max_model_len:
            message = (
                f"without chunked prefill a step must hold the longest sequence: max_total_tokens "
                f"is {max_total_tokens}, max_model_len {max_model_len}; raise the one or lower the "
                "other"
            )
            raise InvalidConfig(message, field="max_total_tokens")

    def _check_whole_prefills(self) -> None:
        """
        Check that no option cuts prompts where chunked prefill is off.

        Raises:
            InvalidConfig: An option does.
        """
        if self.chunked_prefill:
            return
        cuts = {
            "chunked_prefill_size": self.chunked_prefill_size is not None,
            "long_prefill_threshold": self.long_prefill_threshold is not None,
            "max_prefill_share": self.max_prefill_share < 1.0,
        }
        for name, is_set in cuts.items():
            if is_set:
                message = f"{name} cuts prompts, which chunked prefill off forbids: unset one"
                raise InvalidConfig(message, field=name)
