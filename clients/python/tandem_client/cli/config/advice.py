"""
Advice on settings from the counters of a live server: pure rules over two or more snapshots.

Source: SGLang's tuning guide (queue length, token usage, retractions and conservativeness, out of
memory, lpm or fcfs). The rules look at an interval instead of single log lines. If memory is idle,
but requests were retracted or steps ran out of memory, the latter count for more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tandem.engine_config import MAX_LPM_WAITING
from tandem_client.admin import Stats

HEALTHY_QUEUE = range(50, 501)
GOOD_USAGE = 0.9
MAX_RETRACTIONS_PER_MINUTE = 1.0
"""Retractions per minute up to which they cost less than the memory reserved to avoid them."""

LOW_CONSERVATIVENESS = 0.3
HIGH_CONSERVATIVENESS = 1.3
MAX_PLANNING_SHARE = 0.2
"""Largest healthy share of the time spent planning steps; sorting the queue for lpm costs much."""

RARE_HITS, FREQUENT_HITS = 0.05, 0.2
"""Hit rates of the prefix cache: lpm gains nothing below the first, and pays from the second."""
PROMPT_CHUNKS = (4096, 2048)
"""Values of chunked_prefill_size that the guide tries in turn; below them, we halve the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """
    Activity of a server over an interval.

    Attributes:
        seconds: Length of the interval.
        running: Average number of requests with a slot.
        waiting: Average number of requests in the waiting queue.
        token_usage: Average share of KV memory in use, 0 to 1, without blocks that are only cached.
        retractions: Number of requests that lost their blocks for lack of memory, in the interval.
        refused: Number of requests refused in the interval.
        out_of_memory_steps: Number of steps that the executor had no memory for, in the interval.
        prompt_tokens: Number of prompt tokens computed in the interval.
        hit_rate: Share of looked-up tokens found in the prefix cache, 0 to 1; None = no token was
            looked up.
        planning_share: Share of the time spent planning steps.
        schedule_policy: Value of this setting.
        max_batch_size: Value of this setting.
        conservativeness: Value of schedule_conservativeness.
        prompt_chunk: Largest number of tokens of one prompt in a step; None = no chunked prefill.
    """

    seconds: float
    running: float
    waiting: float
    token_usage: float
    retractions: int
    refused: int
    out_of_memory_steps: int
    prompt_tokens: int
    hit_rate: float | None
    planning_share: float
    schedule_policy: str
    max_batch_size: int
    conservativeness: float
    prompt_chunk: int | None

    @property
    def retractions_per_minute(self) -> float:
        """Rate of retractions."""
        return 60 * self.retractions / self.seconds

    @property
    def is_idle(self) -> bool:
        """True if the server had no request, running or waiting."""
        return self.running + self.waiting == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One line of the report; `setting` and `value` are set if it advises to change a setting."""

    verdict: Literal["ok", "change"]
    subject: str
    fact: str
    advice: str = ""
    setting: str | None = None
    value: float | None = None


def load_between(samples: Sequence[Stats], settings: Mapping[str, Any]) -> Load:
    """
    Compute the load from at least two snapshots of one server.

    Args:
        samples: Snapshots, oldest first.
        settings: Settings in force on the server, by name.

    Raises:
        ValueError: There are fewer than two, or the uptime did not grow: the server was restarted.
    """
    first, last = samples[0], samples[-1]
    seconds = last.uptime_s - first.uptime_s
    if len(samples) < 2 or seconds <= 0:
        raise ValueError("two readings of one running server are needed")
    looked_up = last.prefix_cache_lookup_tokens - first.prefix_cache_lookup_tokens
    found = last.prefix_cache_hit_tokens - first.prefix_cache_hit_tokens
    return Load(
        seconds=seconds,
        running=_mean([one.running_requests for one in samples]),
        waiting=_mean([one.waiting_requests for one in samples]),
        token_usage=_mean([one.token_usage for one in samples]),
        retractions=last.retractions - first.retractions,
        refused=last.refused_requests - first.refused_requests,
        out_of_memory_steps=last.out_of_memory_steps - first.out_of_memory_steps,
        prompt_tokens=last.prefill_tokens - first.prefill_tokens,
        hit_rate=found / looked_up if looked_up else None,
        planning_share=(last.schedule_s - first.schedule_s) / seconds,
        schedule_policy=last.schedule_policy,
        max_batch_size=settings["max_batch_size"],
        conservativeness=settings["schedule_conservativeness"],
        prompt_chunk=_prompt_chunk(settings),
    )


def _prompt_chunk(settings: Mapping[str, Any]) -> int | None:
    if not settings["enable_chunked_prefill"]:
        return None
    chunk, most = settings["chunked_prefill_size"], settings["max_total_tokens"]
    return int(min(chunk, most) if chunk > 0 else most)


def advise(load: Load) -> list[Advice]:
    """Return the findings of all rules, also those that advise no change."""
    if load.is_idle:
        return [
            Advice(
                verdict="ok",
                subject="load",
                fact=f"no request in {load.seconds:.0f} s",
                advice="ask again while the server is busy",
            )
        ]
    rules = (_queue, _usage, _out_of_memory, _retractions, _order, _planning)
    return [finding for rule in rules for finding in rule(load)]


def _queue(load: Load) -> Iterator[Advice]:
    fact = f"{load.waiting:.0f} waiting, {load.running:.0f} running"
    if load.waiting < 1:
        advice = (
            "requests come too slowly to keep the server busy: if it should do more, send more at "
            "once"
        )
        yield Advice(verdict="change", subject="queue", fact=fact, advice=advice)
    elif load.waiting < HEALTHY_QUEUE.start:
        advice = f"short; {HEALTHY_QUEUE.start} to {HEALTHY_QUEUE[-1]} keep a server fully busy"
        yield Advice(verdict="ok", subject="queue", fact=fact, advice=advice)
    elif load.waiting <= HEALTHY_QUEUE[-1]:
        yield Advice(verdict="ok", subject="queue", fact=fact, advice="healthy")
    else:
        advice = (
            "long: requests wait for the queue, not for the model; send some to another server, or "
            "bound the queue with max_queued_requests"
        )
        yield Advice(verdict="change", subject="queue", fact=fact, advice=advice)
    if load.refused:
        fact = f"{load.refused} requests refused in {load.seconds:.0f} s"
        advice = "see refused_by_limit of the statistics for the limit to raise"
        yield Advice(verdict="change", subject="refusals", fact=fact, advice=advice)


def _usage(load: Load) -> Iterator[Advice]:
    fact = f"token usage {load.token_usage:.2f}"
    if load.token_usage > GOOD_USAGE:
        yield Advice(verdict="ok", subject="memory", fact=fact, advice="good")
    elif load.waiting < 1:
        yield Advice(verdict="ok", subject="memory", fact=fact, advice="nothing waits for more")
    elif load.out_of_memory_steps:
        advice = "low, but steps run out of memory as they are"
        yield Advice(verdict="ok", subject="memory", fact=fact, advice=advice)
    elif _is_retracting(load):
        advice = "low, but raising it would retract even more"
        yield Advice(verdict="ok", subject="memory", fact=fact, advice=advice)
    elif load.running >= load.max_batch_size:
        yield Advice(
            verdict="change",
            subject="memory",
            fact=f"{fact} with {load.running:.0f} of {load.max_batch_size} sequences running",
            advice="every place in a step is taken: raise max_batch_size",
            setting="max_batch_size",
            value=2 * load.max_batch_size,
        )
    elif load.conservativeness > LOW_CONSERVATIVENESS:
        yield Advice(
            verdict="change",
            subject="memory",
            fact=f"{fact} while {load.waiting:.0f} wait",
            advice="admission is too careful: lower schedule_conservativeness",
            setting="schedule_conservativeness",
            value=LOW_CONSERVATIVENESS,
        )
    else:
        advice = "admission is careless already: prompts wait for max_total_tokens; raise it"
        yield Advice(
            verdict="change",
            subject="memory",
            fact=f"{fact} while {load.waiting:.0f} wait",
            advice=advice,
            setting="max_total_tokens",
        )


def _out_of_memory(load: Load) -> Iterator[Advice]:
    """Advise smaller steps: shorter prompt chunks if prompts were computed, or a smaller batch."""
    if not load.out_of_memory_steps:
        return
    fact = f"{load.out_of_memory_steps} steps that the executor had no memory for"
    value: int | None
    if not load.prompt_tokens:
        what, how, setting = "decoding needs", "lower", "max_batch_size"
        value = max(1, min(load.max_batch_size, math.ceil(load.running)) // 2)
    elif load.prompt_chunk is None:
        what, how, setting, value = "whole prompts need", "turn on", "enable_chunked_prefill", None
    else:
        what, how, setting = "prompts need", "lower", "chunked_prefill_size"
        smaller = (chunk for chunk in PROMPT_CHUNKS if chunk < load.prompt_chunk)
        value = next(smaller, max(1, load.prompt_chunk // 2))
    yield Advice(
        verdict="change",
        subject="out of memory",
        fact=fact,
        advice=f"{what} too much: give KV less memory (mem_fraction_static), or {how} {setting}",
        setting=setting,
        value=value,
    )


def _retractions(load: Load) -> Iterator[Advice]:
    fact = f"{load.retractions} retractions, {load.retractions_per_minute:.1f} a minute"
    if load.retractions == 0:
        yield Advice(verdict="ok", subject="retractions", fact="none")
    elif not _is_retracting(load):
        yield Advice(verdict="ok", subject="retractions", fact=fact, advice="rare enough")
    elif load.conservativeness < HIGH_CONSERVATIVENESS:
        yield Advice(
            verdict="change",
            subject="retractions",
            fact=fact,
            advice="admission is too careless: raise schedule_conservativeness",
            setting="schedule_conservativeness",
            value=HIGH_CONSERVATIVENESS,
        )
    else:
        yield Advice(
            verdict="change",
            subject="retractions",
            fact=fact,
            advice="even careful admission retracts: lower max_batch_size or give more KV memory",
            setting="max_batch_size",
            value=max(1, load.max_batch_size // 2),
        )


def _order(load: Load) -> Iterator[Advice]:
    """Advise lpm if admitting prompts with cached prefixes first pays, or fcfs if it does not."""
    if load.hit_rate is None:
        return
    fact = f"{100 * load.hit_rate:.1f} % of prompt tokens found, policy {load.schedule_policy}"
    advice, policy = "", None
    if load.schedule_policy == "lpm" and load.hit_rate < RARE_HITS and load.waiting >= 1:
        policy = "fcfs"
        advice = "few prompts share a prefix and sorting gains nothing: set schedule_policy to fcfs"
    elif (
        load.schedule_policy == "fcfs"
        and load.hit_rate >= FREQUENT_HITS
        and 1 <= load.waiting <= MAX_LPM_WAITING
        and load.planning_share <= MAX_PLANNING_SHARE
    ):
        policy = "lpm"
        advice = "many prompts share prefixes: set schedule_policy to lpm to use what is cached"
    yield Advice(
        verdict="change" if policy else "ok",
        subject="prefix cache",
        fact=fact,
        advice=advice,
        setting="schedule_policy" if policy else None,
    )


def _planning(load: Load) -> Iterator[Advice]:
    fact = f"{100 * load.planning_share:.1f} % of the time, policy {load.schedule_policy}"
    if load.planning_share <= MAX_PLANNING_SHARE:
        yield Advice(verdict="ok", subject="planning", fact=fact)
    elif load.schedule_policy == "fcfs":
        advice = "the scheduler is short of processor time: give it a core of its own"
        yield Advice(verdict="change", subject="planning", fact=fact, advice=advice)
    else:
        yield Advice(
            verdict="change",
            subject="planning",
            fact=fact,
            advice="ordering the queue costs too much: set schedule_policy to fcfs",
            setting="schedule_policy",
        )


def _is_retracting(load: Load) -> bool:
    return load.retractions_per_minute > MAX_RETRACTIONS_PER_MINUTE


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
