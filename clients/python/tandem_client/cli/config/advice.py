"""
Advice on settings from the counters of a live server: pure rules over two or more snapshots.

Source: SGLang's tuning guide (queue length, token usage, retractions and conservativeness, out of
memory, lpm or fcfs). The rules look at an interval instead of single log lines. If memory is idle,
but requests were retracted or steps ran out of memory, the latter count for more.

What a longer queue than is healthy, or slow tokens, are to be answered with:

    the scheduler plans over a fifth of the time    another cell; more executors would wait for it
    executors compute under four fifths of it       no more executors: they wait for work
    memory or places in a step are left             the settings that admit more, before executors
    busy executors, memory or batches full          more executors; each brings memory of its own
    over 100 ms between tokens, few rows a step     tensor parallel: steps are slow by themselves
    over 100 ms between tokens, many rows           more executors, with fewer rows each
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tandem.engine_config import MAX_LPM_WAITING
from tandem_client.cli.config.load import Load

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
BUSY_SHARE = 0.8
"""Share of the time that executors compute from which more of them would compute more."""
SLOW_TOKEN_S = 0.1
"""Seconds between tokens from which a reader waits; as the default of `tandem simulate`."""
FEW_ROWS = 8
"""Rows of a step up to which its time is that of one row: reading the weights."""
PROMPT_CHUNKS = (4096, 2048)
"""Values of chunked_prefill_size that the guide tries in turn; below them, we halve the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One line of the report; `setting` and `value` are set if it advises to change a setting."""

    verdict: Literal["ok", "change"]
    subject: str
    fact: str
    advice: str = ""
    setting: str | None = None
    value: float | None = None


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
    rules = (_queue, _usage, _out_of_memory, _retractions, _order, _planning, _executors, _tokens)
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
            "long: requests wait for the queue, not for the model; serve more at once, see "
            "executors, or bound the queue with max_queued_requests"
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
    elif load.running >= load.places:
        yield Advice(
            verdict="change",
            subject="memory",
            fact=f"{fact} with {load.running:.0f} of {load.places} sequences running",
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


def _executors(load: Load) -> Iterator[Advice]:
    """Say whether more executors would shorten the queue."""
    if load.busy_share is None:
        return
    fact = f"{load.executors}, computing {100 * load.busy_share:.0f} % of the time"
    has_room = load.token_usage <= GOOD_USAGE and load.running < load.places
    advice, is_change = "", False
    if load.waiting <= HEALTHY_QUEUE[-1]:
        advice = "enough for this queue"
    elif load.planning_share > MAX_PLANNING_SHARE:
        advice = "the scheduler is the limit: send some requests to another cell"
        is_change = True
    elif load.busy_share < BUSY_SHARE:
        advice = "they wait for work: more executors would wait too"
    elif has_room or _is_retracting(load) or load.out_of_memory_steps:
        advice = "they could run more requests as they are: follow the other advice first"
    elif load.token_usage <= GOOD_USAGE:
        advice = "every place in a step is taken: raise max_batch_size, then add executors"
        is_change = True
    else:
        advice = (
            "busy and their memory full: add executors (--executor), each brings memory; where "
            "weights take most of it, tensor parallel frees more"
        )
        is_change = True
    yield Advice(
        verdict="change" if is_change else "ok", subject="executors", fact=fact, advice=advice
    )


def _tokens(load: Load) -> Iterator[Advice]:
    """Say what would make slow tokens faster, where it is the device that takes their time."""
    if load.step_s is None or load.inter_token_s is None:
        return
    fact = f"{1e3 * load.inter_token_s:.0f} ms apart, {1e3 * load.step_s:.0f} ms a step"
    advice, is_change = "", load.inter_token_s > SLOW_TOKEN_S
    rows = load.running / load.executors
    if is_change and load.step_s < load.inter_token_s / 2:
        advice = "slow, but not by the model: requests pause between their steps"
    elif is_change and rows <= FEW_ROWS:
        advice = (
            f"steps are slow with {rows:.0f} rows: tensor parallel makes each shorter, more "
            "executors do not"
        )
    elif is_change:
        advice = (
            f"steps have {rows:.0f} rows: add executors (--executor) or lower max_batch_size; for "
            "one request alone, tensor parallel"
        )
    yield Advice(
        verdict="change" if is_change else "ok", subject="tokens", fact=fact, advice=advice
    )


def _is_retracting(load: Load) -> bool:
    return load.retractions_per_minute > MAX_RETRACTIONS_PER_MINUTE
