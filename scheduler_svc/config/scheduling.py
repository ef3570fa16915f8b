"""
The settings of scheduling, under the names they have in the systems they come from; see
`core.request.options.CoreOptions` for their meanings.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, TypeVar

from pydantic import Field

from scheduler_svc.core.request.options import (
    MAX_WINDOW,
    CoreOptions,
    Eviction,
    OnPressure,
    Overlength,
    PreemptionMode,
    Routing,
    SchedulePolicy,
    StepPriority,
    VictimRule,
)
from tandem.engine_config import MAX_GIB, MAX_LPM_WAITING, EngineConfig
from tandem.errors import InvalidConfig
from tandem.settings.options import Group
from tandem.settings.schema import Alias, Metavar, OptionGroup
from tandem.wording import GIB

_Choice = TypeVar("_Choice", bound=StrEnum)


def _choices(kind: type[StrEnum]) -> Metavar:
    return Metavar("{" + ",".join(kind) + "}")


class SchedulingSettings(OptionGroup):
    """Fields that become `CoreOptions`; their defaults are those of that class."""

    group: ClassVar[Group] = Group.SCHEDULING

    schedule_policy: Annotated[str, _choices(SchedulePolicy)] = Field(
        "lpm",
        description="order of admission: first come (fcfs), longest cached prefix (lpm; fcfs "
        f"without prefix caching or while more than {MAX_LPM_WAITING} wait), dfs-weight, longest "
        "output (lof), random",
    )
    schedule_conservativeness: float = Field(
        1.0,
        description="scales the share of max_tokens that running requests are expected to use: "
        "lower admits more, higher retracts less; 0 admits whatever fits now",
    )
    ageing_s: float = Field(
        5.0, description="seconds of waiting that raise a request by one level of priority"
    )
    priority_preemption: bool = Field(
        False, description="a waiting request may take the place of a running one it goes before"
    )
    routing: Annotated[str, _choices(Routing), Alias("prefix_caching_coordinator_policy")] = Field(
        "load_balanced",
        description="which of several executors a request waits for: the one with the least to do "
        "for it (load_balanced), that was given most of its prompt (longest_prefix) or its first "
        "block (first_prefix_block), or each in turn; a short while, then any",
    )
    prefix_caching_routing_alpha: float = Field(
        0.5,
        description="weight of the prompt against free places under routing longest_prefix, 0 to "
        "1; 1: the prompt alone",
    )
    enable_prefix_caching: Annotated[bool, Alias("prefix_caching")] = Field(
        True, description="share and keep the KV of equal prefixes"
    )
    prefix_caching_eviction_policy: Annotated[str, _choices(Eviction), Alias("eviction")] = Field(
        "lru",
        description="full blocks that no request uses stay findable until needed (lru), or are "
        "free at once (ref_zero)",
    )
    on_pressure: Annotated[str, _choices(OnPressure)] = Field(
        "queue", description="what happens to new requests while KV use is over memory_threshold"
    )
    overlength_policy: Annotated[str, _choices(Overlength), Alias("overlength")] = Field(
        "reject",
        description="what happens to requests longer than max_model_len; truncate lowers "
        "max_tokens, and drops the oldest tokens of a prompt that leaves no room",
    )
    max_queued_requests: int | None = Field(
        None, description="most requests that wait, more are refused; default: no limit"
    )
    max_queued_tokens: int | None = Field(
        None,
        description="most uncached prompt tokens that wait, more are refused; default: no limit",
    )
    max_tenant_requests: int | None = Field(
        None, description="most requests of one tenant in the system; default: no limit"
    )
    max_tenant_queued_tokens: int | None = Field(
        None,
        description="most uncached prompt tokens of one tenant that wait; default: no limit",
    )
    tenant_tokens_per_minute: int | None = Field(
        None,
        description="most tokens of prompts and outputs of one tenant in a minute; default: no "
        "limit",
    )
    victim_rule: Annotated[str, _choices(VictimRule)] = Field(
        "fewest_generated",
        description="which request gives up its blocks when too few are free",
    )
    paused_budget_blocks: int = Field(
        0, description="blocks that paused requests may keep, under victim_rule paused_budget"
    )
    paused_buffer_size_gb: float | None = Field(
        None,
        ge=0,
        le=MAX_GIB,
        description="GiB of KV memory that paused requests may keep, instead of a number of blocks",
    )
    preemption_mode: Annotated[str, _choices(PreemptionMode)] = Field(
        "recompute",
        description="how a preempted request gets its KV back; swap needs host blocks on the "
        "executor and recomputes where they run out",
    )
    step_priority: Annotated[str, _choices(StepPriority)] = Field(
        "decode-first", description="which tokens a step computes first"
    )
    enable_chunked_prefill: Annotated[bool, Alias("chunked_prefill")] = Field(
        True,
        description="compute a prompt in several steps where one has no room; off: it waits for a "
        "step that has, max_total_tokens must be at least max_model_len",
    )
    chunked_prefill_size: int = Field(
        -1,
        description="most prompt tokens of one request in one step; 0 or -1: no limit but "
        "max_total_tokens",
    )
    long_prefill_threshold: Annotated[int, Alias("long_prefill_token_threshold")] = Field(
        0,
        description="prompts with more tokens left than this leave the rest of a step to shorter "
        "ones; 0: off",
    )
    max_prefill_share: float = Field(
        1.0,
        description="largest share of max_total_tokens that goes to prompts while others decode, "
        "over 0 to 1",
    )
    materialize_only_last_token_logits: bool = Field(
        False,
        description="compute no logits but those that tokens are sampled from, and refuse requests "
        "for log probabilities of their prompts",
    )
    window: int = Field(
        2,
        ge=1,
        le=MAX_WINDOW,
        description="steps sent before a result is back, for each lane of an executor with "
        "pipeline stages; at most as many as the executor takes",
    )
    run_ahead: int = Field(
        4,
        ge=1,
        le=MAX_WINDOW,
        description="the same of all lanes while no request waits, memory lasts and steps take "
        "under 5 ms; no effect where window allows as many",
    )
    track_request_events: bool = Field(
        False, description="keep what happened to each request, for GetRequestEvents"
    )
    track_generated_token_events: Annotated[bool, Alias("track_token_events")] = Field(
        False, description="also keep one event per token"
    )
    track_paused_request_events: Annotated[bool, Alias("track_paused_events")] = Field(
        False, description="also keep one event per step that a request stays paused"
    )

    def core_options(self, kv_bytes_per_block: int = 0) -> CoreOptions:
        """
        Return the core's options for these settings.

        Args:
            kv_bytes_per_block: Bytes of one KV block on the executor; 0 where not known yet.

        Raises:
            InvalidConfig: A value is out of range; the error names the first one.
        """
        options = CoreOptions(
            schedule_policy=_policy(self.schedule_policy),
            ageing_s=self.ageing_s,
            priority_preemption=self.priority_preemption,
            routing=_one_of(Routing, "routing", self.routing),
            prefix_caching_routing_alpha=self.prefix_caching_routing_alpha,
            prefix_caching=self.enable_prefix_caching,
            eviction=_one_of(
                Eviction, "prefix_caching_eviction_policy", self.prefix_caching_eviction_policy
            ),
            on_pressure=_one_of(OnPressure, "on_pressure", self.on_pressure),
            overlength=_one_of(Overlength, "overlength_policy", self.overlength_policy),
            max_queued_requests=self.max_queued_requests,
            max_queued_tokens=self.max_queued_tokens,
            max_tenant_requests=self.max_tenant_requests,
            max_tenant_queued_tokens=self.max_tenant_queued_tokens,
            tenant_tokens_per_minute=self.tenant_tokens_per_minute,
            schedule_conservativeness=self.schedule_conservativeness,
            victim_rule=_one_of(VictimRule, "victim_rule", self.victim_rule),
            paused_budget_blocks=self._paused_blocks(kv_bytes_per_block),
            preemption_mode=_one_of(PreemptionMode, "preemption_mode", self.preemption_mode),
            step_priority=_one_of(StepPriority, "step_priority", self.step_priority),
            chunked_prefill=self.enable_chunked_prefill,
            chunked_prefill_size=_or_off("chunked_prefill_size", self.chunked_prefill_size),
            long_prefill_threshold=_or_off("long_prefill_threshold", self.long_prefill_threshold),
            max_prefill_share=self.max_prefill_share,
            materialize_only_last_token_logits=self.materialize_only_last_token_logits,
            window=self.window,
            run_ahead=self.run_ahead,
            track_request_events=self.track_request_events,
            track_token_events=self.track_generated_token_events,
            track_paused_events=self.track_paused_request_events,
        )
        options.validate()
        return options

    def _paused_blocks(self, kv_bytes_per_block: int) -> int:
        if self.paused_buffer_size_gb is None:
            return self.paused_budget_blocks
        if self.paused_budget_blocks:
            message = (
                f"paused_budget_blocks ({self.paused_budget_blocks}) and paused_buffer_size_gb "
                f"({self.paused_buffer_size_gb:g}) set the same: keep one of them"
            )
            raise InvalidConfig(message, field="paused_buffer_size_gb")
        num_bytes = self.paused_buffer_size_gb * GIB
        return int(num_bytes // kv_bytes_per_block) if kv_bytes_per_block else 0


def without_effect(options: CoreOptions, limits: EngineConfig, num_host_blocks: int) -> list[str]:
    """
    Return a warning for each setting that has no effect, or no useful one, beside the others.

    Args:
        options: Scheduling options of the core.
        limits: Limits in force.
        num_host_blocks: Blocks of host memory that the executor has for swapping.
    """
    pauses, budget = options.victim_rule is VictimRule.PAUSED_BUDGET, options.paused_budget_blocks
    swaps = options.preemption_mode is PreemptionMode.SWAP
    rules = (
        (
            swaps and not num_host_blocks,
            (
                "preemption_mode is swap and the executor has no host blocks, so all is computed "
                "again: set its swap_space_gb"
            ),
        ),
        (
            num_host_blocks and not swaps,
            (
                f"the executor keeps {num_host_blocks} host blocks and preemption_mode is "
                f"{options.preemption_mode}: set it to swap, or swap_space_gb to 0"
            ),
        ),
        (
            pauses and not budget,
            (
                "victim_rule is paused_budget and the budget is 0 blocks, so none is paused: set "
                "paused_budget_blocks or paused_buffer_size_gb"
            ),
        ),
        (
            budget and not pauses,
            (
                f"paused_budget_blocks is {budget} and victim_rule is {options.victim_rule}: only "
                "paused_budget pauses requests"
            ),
        ),
        (
            limits.memory_threshold == 0.0,
            "memory_threshold is 0, so every request is refused: raise it",
        ),
    )
    return [line for holds, line in rules if holds]


def _policy(text: str) -> SchedulePolicy:
    if text not in set(SchedulePolicy):
        known = ", ".join(SchedulePolicy)
        message = f"Unknown schedule_policy: policy={text!r}; choose one of {known}"
        raise InvalidConfig(message, field="schedule_policy")
    return SchedulePolicy(text)


def _one_of(kind: type[_Choice], name: str, text: str) -> _Choice:
    if text not in set(kind):
        message = f"{name} is {text!r}: choose one of {', '.join(kind)}"
        raise InvalidConfig(message, field=name)
    return kind(text)


def _or_off(name: str, value: int) -> int | None:
    if value < -1:
        message = f"{name} is {value}: it must be at least 1, or 0 or -1 for no limit"
        raise InvalidConfig(message, field=name)
    return value if value > 0 else None
