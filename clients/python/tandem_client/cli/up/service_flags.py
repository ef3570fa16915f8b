"""
Flags of the services that `tandem up` takes and passes on unchanged: the services check them.

They are a table, not parameters of a function, because this code uses none of their values. The
table repeats the services' own kinds and defaults of flags; a test compares them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

SCHEDULER, EXECUTOR = "scheduler", "executor"
BOTH = (EXECUTOR, SCHEDULER)
ON, OFF = "on", "off"
"""Values that switches have by default."""


@dataclass(frozen=True, slots=True)
class ServiceFlag:
    """
    One flag.

    Attributes:
        name: Name with underscores.
        kind: Kind of the value, as in the services' --help; empty for a switch.
        default: Default as text; empty if `text` says what unset means.
        text: Purpose of the flag.
        services: Services that take the flag.
        aliases: Other spellings, those of vLLM, SGLang and Megatron Core among them.
    """

    name: str
    kind: str
    default: str
    text: str
    services: tuple[str, ...] = (SCHEDULER,)
    aliases: tuple[str, ...] = ()

    @property
    def is_switch(self) -> bool:
        """True if the flag takes no value, and can be given as --x and --no-x."""
        return not self.kind


_Flag = ServiceFlag
_PRESETS = (
    "{low-latency,high-throughput,memory-constrained,long-context,deploy-throughput,"
    "deploy-latency,deploy-tight-memory}"
)
ADDRESSES = (
    _Flag("listen", "HOST:PORT", "127.0.0.1:50051", "Public address; port 0 = any."),
    _Flag("admin_listen", "HOST:PORT", "127.0.0.1:50052", "For operators; empty = none."),
    _Flag("metrics_listen", "HOST:PORT", "127.0.0.1:9464", "Of /metrics; empty = none."),
)
MODEL = (
    _Flag("model_name", "NAME", "", "Name clients see; unset: the directory's.", (EXECUTOR,)),
    _Flag(
        "dtype",
        "{auto,float32,bfloat16,float16}",
        "auto",
        "Type of weights and KV.",
        (EXECUTOR,),
    ),
    _Flag("device", "NAME", "auto", "auto, cpu, cuda or cuda:N.", (EXECUTOR,)),
)
LIMITS = (
    _Flag("preset", _PRESETS, "", "Named starting point; flags and file win over it.", BOTH),
    _Flag("block_size", "INT", "16", "Tokens per KV block.", BOTH, ("block_size_tokens",)),
    _Flag(
        "max_num_blocks",
        "INT",
        "",
        "KV blocks; unset: 0.9 of a GPU, a quarter of the free memory for a CPU.",
        BOTH,
    ),
    _Flag("buffer_size_gb", "FLOAT", "", "Instead: GiB of KV memory.", (EXECUTOR,)),
    _Flag(
        "mem_fraction_static",
        "FLOAT",
        "",
        "Instead: memory share of weights and KV.",
        (EXECUTOR,),
    ),
    _Flag(
        "gpu_memory_utilization", "FLOAT", "", "Instead: memory share of everything.", (EXECUTOR,)
    ),
    _Flag("swap_space_gb", "FLOAT", "0.0", "GiB of host memory for preempted KV.", (EXECUTOR,)),
    _Flag(
        "max_batch_size",
        "INT",
        "32",
        "Most sequences in one step.",
        BOTH,
        ("max_running_requests", "max_requests"),
    ),
    _Flag(
        "max_num_seqs",
        "INT",
        "256",
        "Most requests in the system, waiting ones too; vLLM's is --max-batch-size.",
    ),
    _Flag(
        "max_model_len",
        "INT",
        "",
        "Most tokens of prompt plus output; unset: the model's, if the KV memory holds them.",
        BOTH,
        ("max_sequence_length",),
    ),
    _Flag(
        "max_total_tokens",
        "INT",
        "4096",
        "Most tokens in one step.",
        BOTH,
        ("max_num_batched_tokens",),
    ),
    _Flag("memory_threshold", "FLOAT", "0.9", "KV share in use at which no prompt is admitted."),
)
SCHEDULING = (
    _Flag("schedule_policy", "{fcfs,lpm,dfs-weight,lof,random}", "lpm", "Who is admitted next."),
    _Flag("schedule_conservativeness", "FLOAT", "1.0", "Lower admits more, higher retracts less."),
    _Flag("ageing_s", "FLOAT", "5.0", "Seconds of waiting that raise a request by one priority."),
    _Flag("priority_preemption", "", OFF, "Better requests take running ones' places."),
    _Flag(
        "enable_prefix_caching",
        "",
        ON,
        "Share and keep the KV of equal prefixes.",
        aliases=("prefix_caching",),
    ),
    _Flag(
        "prefix_caching_eviction_policy",
        "{lru,ref_zero}",
        "lru",
        "When unused KV goes.",
        aliases=("eviction",),
    ),
    _Flag("on_pressure", "{queue,refuse}", "queue", "New requests while KV memory is short."),
    _Flag(
        "overlength_policy",
        "{reject,truncate}",
        "reject",
        "Requests over max_model_len.",
        aliases=("overlength",),
    ),
    _Flag("max_queued_requests", "INT", "", "Most requests that wait; unset: no limit."),
    _Flag(
        "max_queued_tokens", "INT", "", "Most uncached prompt tokens that wait; unset: no limit."
    ),
    _Flag("max_tenant_requests", "INT", "", "Most requests of one tenant; unset: no limit."),
    _Flag(
        "victim_rule",
        "{fewest_generated,last_admitted,paused_budget}",
        "fewest_generated",
        "Which request gives up its blocks.",
    ),
    _Flag("paused_budget_blocks", "INT", "0", "Blocks that paused requests may keep."),
    _Flag("paused_buffer_size_gb", "FLOAT", "", "Instead: GiB of KV memory that they may keep."),
    _Flag(
        "preemption_mode", "{recompute,swap}", "recompute", "How preempted requests get KV back."
    ),
    _Flag("step_priority", "{decode-first,prefill-first}", "decode-first", "What steps run first."),
    _Flag(
        "enable_chunked_prefill",
        "",
        ON,
        "Compute a prompt in several steps.",
        aliases=("chunked_prefill",),
    ),
    _Flag("chunked_prefill_size", "INT", "-1", "Most tokens of one prompt in one step; -1 = all."),
    _Flag(
        "long_prefill_threshold",
        "INT",
        "0",
        "Longer prompts let shorter ones pass; 0 = off.",
        aliases=("long_prefill_token_threshold",),
    ),
    _Flag("max_prefill_share", "FLOAT", "1.0", "Share of a step for prompts while others decode."),
    _Flag("window", "INT", "2", "Steps sent before a result is back."),
    _Flag("run_ahead", "INT", "4", "The same while no request waits and steps are short."),
    _Flag("track_request_events", "", OFF, "Keep what happens to requests."),
    _Flag(
        "track_generated_token_events",
        "",
        OFF,
        "Also each token.",
        aliases=("track_token_events",),
    ),
    _Flag(
        "track_paused_request_events", "", OFF, "Also each pause.", aliases=("track_paused_events",)
    ),
)
COMPUTING = (
    _Flag(
        "batch_invariant", "", OFF, "Same tokens whatever runs beside them; slower.", (EXECUTOR,)
    ),
    _Flag("num_threads", "INT", "", "CPU threads; unset: one per physical core.", (EXECUTOR,)),
    _Flag("cpu_extension", "{auto,on,off}", "auto", "C++ kernels on the CPU.", (EXECUTOR,)),
    _Flag(
        "num_cuda_graphs", "{default,none,-1,N}", "default", "Decode steps to capture.", (EXECUTOR,)
    ),
    _Flag(
        "cuda_graph_mixed_prefill_count", "INT", "16", "Prompts in a captured step.", (EXECUTOR,)
    ),
    _Flag(
        "use_cuda_graphs_for_non_decode_steps",
        "",
        ON,
        "Capture steps with prompts as well.",
        (EXECUTOR,),
    ),
)
SERVING = (
    _Flag("frontends", "INT", "1", "Frontend processes that share the public address."),
    _Flag("max_message_bytes", "INT", "16777216", "Largest request message."),
    _Flag("stall_deadline_s", "FLOAT", "60.0", "Longest wait for a client that does not read."),
    _Flag("stream_buffer_bytes", "INT", "1048576", "Most output that waits for one client."),
    _Flag("recovery_timeout_s", "FLOAT", "60.0", "Longest wait of requests for a lost executor."),
    _Flag("lost_after_s", "FLOAT", "30.0", "Silence after which an executor is given up."),
    _Flag("ready_grace_s", "FLOAT", "2.0", "Its silence after which readiness turns off."),
    _Flag("lease_ms", "INT", "10000", "Silence after which another scheduler may have it."),
    _Flag("scheduler_name", "NAME", "", "Who the scheduler is to executors; unset: host, address."),
    _Flag("stop_grace_s", "FLOAT", "20.0", "Longest wait for the running step.", (EXECUTOR,)),
    _Flag("static_kv_memory_pointers", "", OFF, "Suspending keeps KV addresses.", (EXECUTOR,)),
    _Flag("collect_margins", "", OFF, "Report by how much tokens won; slower.", (EXECUTOR,)),
    _Flag("logging_step_interval", "INT", "0", "Steps from one line in the log to the next."),
    _Flag("log_level", "{debug,info,warning,error}", "info", "Least severe event to log.", BOTH),
    _Flag("log_format", "{json,console}", "console", "Of the services' logs.", BOTH),
)
PANELS = {
    "Addresses": ADDRESSES,
    "Model": MODEL,
    "Engine limits": LIMITS,
    "Scheduling": SCHEDULING,
    "Computing": COMPUTING,
    "Services": SERVING,
}
FLAGS = {flag.name: flag for flags in PANELS.values() for flag in flags}
"""All flags by name."""


def takes_service_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command with ``**flags`` an option for every flag of the table."""
    signature = inspect.signature(command, eval_str=True)
    own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    passed = [
        inspect.Parameter(
            flag.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=_option(flag, panel),
        )
        for panel, flags in PANELS.items()
        for flag in flags
    ]
    command.__signature__ = signature.replace(parameters=[*own, *passed])  # type: ignore[attr-defined]  # typer reads it
    return command


def flags_for(service: str, values: Mapping[str, Any]) -> list[str]:
    """Return the command-line arguments for a service: those of the values that it takes."""
    return arguments_of(
        {name: value for name, value in values.items() if service in FLAGS[name].services}
    )


def arguments_of(values: Mapping[str, Any]) -> list[str]:
    """Return the command-line arguments for all values that are not None."""
    return [_argument(name, value) for name, value in values.items() if value is not None]


def _option(flag: ServiceFlag, panel: str) -> Any:
    names = [f"--{_dashed(name)}" for name in (flag.name, *flag.aliases)]
    default = f" [default: {flag.default}]" if flag.default else ""
    text = f"{flag.text}{default}"
    if flag.is_switch:
        both = [f"{name}/--no-{name[2:]}" for name in names]
        return Annotated[bool | None, typer.Option(*both, help=text, rich_help_panel=panel)]
    option = typer.Option(*names, help=text, rich_help_panel=panel, metavar=flag.kind)
    return Annotated[str | None, option]


def _argument(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{_dashed(name)}" if value else f"--no-{_dashed(name)}"
    return f"--{_dashed(name)}={value}"


def _dashed(name: str) -> str:
    return name.replace("_", "-")
