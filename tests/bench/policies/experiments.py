"""Comparisons, and the claims that each is said to show."""

from __future__ import annotations

import dataclasses

import claims
from claims import Claim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """
    One question put to several workloads.

    Attributes:
        name: Of its folder of plots.
        title: Its heading.
        question: What is compared, and why it should matter.
        workloads: Preset of the requests, with the settings that load the machine.
        base: Settings of all its runs.
        variants: Label and settings of each row.
        columns: Headings of the numbers that answer it.
        plotted: The workload that is drawn.
        claims: What it shows.
    """

    name: str
    title: str
    question: str
    workloads: dict[str, dict[str, str]]
    base: dict[str, str]
    variants: dict[str, dict[str, str]]
    columns: tuple[str, ...]
    plotted: str
    claims: tuple[Claim, ...] = ()


def _variants(name: str, *values: str) -> dict[str, dict[str, str]]:
    return {value: {name: value} for value in values}


# Memory for 48,000 tokens: policies for a shortage have work. Enough requests that it lasts.
_TIGHT = {"machine": "h100-8b-tight"}
_LOADED = {
    "shared-prefix": {"request_rate": "30"},
    "chat": {"request_rate": "150", "think_s": "1"},
    "long-tail": {"request_rate": "30", "ask_slack": "2"},
}
_LONG = {
    "chat": {
        "request_rate": "150",
        "think_s": "1",
        "output_len": "lognormal:500:0.8:2048",
        "max_tokens": "2048",
    },
    "long-tail": {
        "request_rate": "30",
        "prompt_len": "lognormal:250:1.2:6000",
        "output_len": "lognormal:400:1.1:2048",
    },
    "reasoning": {"request_rate": "14"},
}
_LATENCY = ("out tok/s", "good/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "e2e p50")

EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        name="order",
        title="Order of the queue",
        question=(
            "Which waiting request is admitted next: the oldest (fcfs), the one with the longest "
            "cached prefix (lpm), depth first over the tree of prefixes (dfs-weight), the one that "
            "asks for the longest output (lof) or any (random). Requests that arrived in an earlier "
            "period of 5 s (`ageing_s`) go first whatever the policy, so that none starves."
        ),
        workloads=_LOADED,
        base=_TIGHT,
        variants={
            **_variants("schedule_policy", "fcfs", "lpm", "dfs-weight", "lof", "random"),
            "lpm, ageing 60 s": {"schedule_policy": "lpm", "ageing_s": "60"},
        },
        columns=(*_LATENCY, "TTFT max", "hit %"),
        plotted="shared-prefix",
        claims=claims.ORDER,
    ),
    Experiment(
        name="cache",
        title="Prefix cache and eviction",
        question=(
            "No cache, one that keeps a block only while a request uses it (ref_zero), and one that "
            "keeps blocks until their memory is needed (lru). Without a cache lpm is fcfs."
        ),
        workloads=_LOADED,
        base=_TIGHT,
        variants={
            "off": {"prefix_caching": "false"},
            "ref_zero": {"eviction": "ref_zero"},
            "lru": {"eviction": "lru"},
        },
        columns=(*_LATENCY, "hit %", "KV %"),
        plotted="chat",
        claims=claims.CACHE,
    ),
    Experiment(
        name="conservativeness",
        title="Conservativeness of admission",
        question=(
            "How much of what running requests asked for is expected to be used when another is to "
            "be admitted: little (0.3) fills the memory and preempts, much (1.3) leaves room."
        ),
        workloads=_LONG,
        base={**_TIGHT, "prefix_caching": "false"},
        variants=_variants("schedule_conservativeness", "1.0", "0", "0.3", "1.3"),
        columns=(*_LATENCY, "preempted", "recomputed", "KV %", "rows"),
        plotted="reasoning",
        claims=claims.CONSERVATIVENESS,
    ),
    Experiment(
        name="preemption",
        title="Recompute against swap",
        question=(
            "How a preempted request gets its KV back: computed again, or from host memory. "
            "Conservativeness 0, so that there is something to preempt."
        ),
        workloads=_LONG,
        base={**_TIGHT, "prefix_caching": "false", "schedule_conservativeness": "0"},
        variants=_variants("preemption_mode", "recompute", "swap"),
        columns=(*_LATENCY, "ITL max", "preempted", "recomputed", "swapped"),
        plotted="reasoning",
        claims=claims.PREEMPTION,
    ),
    Experiment(
        name="victims",
        title="Victims of preemption",
        question=(
            "Which request is preempted when there are not enough blocks: the one with the fewest "
            "outputs, the last admitted, or pausing with a budget of 600 blocks that paused requests "
            "may keep. Conservativeness 0."
        ),
        workloads=_LONG,
        base={**_TIGHT, "prefix_caching": "false", "schedule_conservativeness": "0"},
        variants={
            "fewest_generated": {"victim_rule": "fewest_generated"},
            "last_admitted": {"victim_rule": "last_admitted"},
            "paused_budget": {"victim_rule": "paused_budget", "paused_budget_blocks": "600"},
        },
        columns=(*_LATENCY, "e2e p99", "preempted", "recomputed"),
        plotted="reasoning",
        claims=claims.VICTIMS,
    ),
    Experiment(
        name="step",
        title="Decode first against prefill first",
        question=(
            "Which tokens a step computes first. With decode-first, prompts get what decodes leave "
            "of 2,048 tokens; prefill-first computes prompts before any decode; a prefill "
            "share bounds what prompts get while others decode; a chunk size bounds one prompt."
        ),
        workloads={
            "shared-prefix": {"request_rate": "40"},
            "chat": {"request_rate": "150", "think_s": "1"},
            "long-tail": {"request_rate": "20"},
        },
        base={"machine": "h100-8b"},
        variants={
            "decode-first": {"step_priority": "decode-first"},
            "prefill-first": {"step_priority": "prefill-first"},
            "decode-first, share 0.25": {"max_prefill_share": "0.25"},
            "decode-first, chunks of 256": {"chunked_prefill_size": "256"},
            "decode-first, long over 512": {"long_prefill_threshold": "512"},
        },
        columns=(*_LATENCY, "ITL max", "rows"),
        plotted="long-tail",
        claims=claims.STEP,
    ),
)
