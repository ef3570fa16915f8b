"""
Flags of the services that `tandem up` takes and passes on as they are: the services judge them.

They are a table, not parameters of a function, because nothing here looks at their values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

SCHEDULER, EXECUTOR = "scheduler", "executor"
BOTH = (EXECUTOR, SCHEDULER)


@dataclass(frozen=True, slots=True)
class ServiceFlag:
    """One flag: its name with underscores, what it is for, and who takes it."""

    name: str
    text: str
    services: tuple[str, ...] = (SCHEDULER,)
    is_switch: bool = False


LIMITS = (
    ServiceFlag("preset", "Named starting point, e.g. low-latency or high-throughput.", BOTH),
    ServiceFlag("block_size", "Tokens per KV block.", BOTH),
    ServiceFlag("max_num_blocks", "KV blocks.", BOTH),
    ServiceFlag("buffer_size_gb", "Instead: GiB of KV memory.", (EXECUTOR,)),
    ServiceFlag("mem_fraction_static", "Instead: memory share of weights and KV.", (EXECUTOR,)),
    ServiceFlag("gpu_memory_utilization", "Instead: memory share of everything.", (EXECUTOR,)),
    ServiceFlag("swap_space_gb", "GiB of host memory for preempted requests.", (EXECUTOR,)),
    ServiceFlag("max_batch_size", "Most sequences in one step.", BOTH),
    ServiceFlag("max_num_seqs", "Most requests in the system."),
    ServiceFlag("max_model_len", "Most tokens of prompt plus output.", BOTH),
    ServiceFlag("max_total_tokens", "Most tokens in one step.", BOTH),
    ServiceFlag("memory_threshold", "Share of KV blocks in use at which no prompt is admitted."),
)
SCHEDULING = (
    ServiceFlag("schedule_policy", "fcfs, lpm, dfs-weight, lof or random."),
    ServiceFlag("schedule_conservativeness", "Lower admits more, higher retracts less."),
    ServiceFlag("ageing_s", "Seconds of waiting that raise a request by one priority."),
    ServiceFlag(
        "priority_preemption", "Better requests take running ones' places.", is_switch=True
    ),
    ServiceFlag("no_enable_prefix_caching", "Share and keep no KV.", is_switch=True),
    ServiceFlag("prefix_caching_eviction_policy", "lru or ref_zero."),
    ServiceFlag("on_pressure", "queue or refuse, while KV memory is short."),
    ServiceFlag("overlength_policy", "reject or truncate requests over max_model_len."),
    ServiceFlag("max_queued_requests", "Most requests that wait."),
    ServiceFlag("max_queued_tokens", "Most uncached prompt tokens that wait."),
    ServiceFlag("max_tenant_requests", "Most requests of one tenant."),
    ServiceFlag("victim_rule", "fewest_generated, last_admitted or paused_budget."),
    ServiceFlag("paused_budget_blocks", "Blocks that paused requests may keep."),
    ServiceFlag("paused_buffer_size_gb", "Instead: GiB of KV memory that they may keep."),
    ServiceFlag("preemption_mode", "recompute or swap."),
    ServiceFlag("step_priority", "decode-first or prefill-first."),
    ServiceFlag("chunked_prefill_size", "Most prompt tokens of one request in one step."),
    ServiceFlag("long_prefill_threshold", "Longer prompts let shorter ones pass; 0 = off."),
    ServiceFlag("max_prefill_share", "Share of a step for prompts while others decode."),
    ServiceFlag("window", "Steps sent before a result is back."),
    ServiceFlag("run_ahead", "The same while nobody waits and steps are short."),
    ServiceFlag("track_request_events", "Keep what happens to requests.", is_switch=True),
    ServiceFlag("track_generated_token_events", "Also each token.", is_switch=True),
    ServiceFlag("track_paused_request_events", "Also each pause.", is_switch=True),
)
COMPUTING = (
    ServiceFlag(
        "batch_invariant", "Same tokens whatever runs beside them; slower.", (EXECUTOR,), True
    ),
    ServiceFlag("num_threads", "CPU threads of one operation.", (EXECUTOR,)),
    ServiceFlag("cpu_extension", "auto, on or off: C++ kernels on the CPU.", (EXECUTOR,)),
    ServiceFlag("num_cuda_graphs", "default, none, -1 or how many decode steps.", (EXECUTOR,)),
    ServiceFlag("cuda_graph_mixed_prefill_count", "Prompts in a captured step.", (EXECUTOR,)),
    ServiceFlag(
        "no_use_cuda_graphs_for_non_decode_steps", "Capture decodes alone.", (EXECUTOR,), True
    ),
)
_FLAGS = {
    **{flag.name: (flag, "Engine limits") for flag in LIMITS},
    **{flag.name: (flag, "Scheduling") for flag in SCHEDULING},
    **{flag.name: (flag, "Computing") for flag in COMPUTING},
}


def takes_service_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command with ``**flags`` have every flag of the table as an option."""
    signature = inspect.signature(command, eval_str=True)
    own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    passed = [
        inspect.Parameter(
            flag.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if flag.is_switch else None,
            annotation=_option(flag, panel),
        )
        for flag, panel in _FLAGS.values()
    ]
    command.__signature__ = signature.replace(parameters=[*own, *passed])  # type: ignore[attr-defined]  # typer reads it
    return command


def flags_for(service: str, values: Mapping[str, Any]) -> list[str]:
    """The arguments by which a service is given what of these values is its own."""
    return [
        _argument(name, value)
        for name, value in values.items()
        if value not in (None, False) and service in _FLAGS[name][0].services
    ]


def _option(flag: ServiceFlag, panel: str) -> Any:
    dashed = flag.name.replace("_", "-")
    if flag.is_switch:
        switch = typer.Option(f"--{dashed}", help=flag.text, rich_help_panel=panel)
        return Annotated[bool, switch]
    option = typer.Option(f"--{dashed}", help=flag.text, rich_help_panel=panel, metavar="VALUE")
    return Annotated[str | None, option]


def _argument(name: str, value: str | bool) -> str:
    dashed = name.replace("_", "-")
    return f"--{dashed}" if value is True else f"--{dashed}={value}"
