"""Claims of the comparisons, each sentence with the numbers that must bear it out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from tables import Cell

Cells = dict[str, list[Cell]]
"""Variants by workload."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """A sentence about the numbers, and whether they bear it out."""

    text: str
    holds: Callable[[Cells], bool]


def cell(cells: Cells, workload: str, label: str) -> Cell:
    """Return one variant on one workload."""
    return next(one for one in cells[workload] if one.label == label)


def change(cells: Cells, workload: str, heading: str, label: str, base: str) -> float:
    """Return the mean change of a variant against another, seed by seed; 0.1 is 10 % more."""
    found, other = cell(cells, workload, label), cell(cells, workload, base)
    return float(np.mean(found.changes(heading, other)))


def are_equal(cells: Cells, workload: str, *labels: str) -> bool:
    """
    Return True when variants gave the same results to the last digit, but for what stayed cached.
    """
    results = [
        [
            {**outcome.results, "over_time": None}
            for outcome in cell(cells, workload, label).outcomes
        ]
        for label in labels
    ]
    return all(one == results[0] for one in results)


def mean(cells: Cells, workload: str, heading: str, label: str) -> float:
    """Return the mean of a variant over the seeds."""
    return cell(cells, workload, label).mean(heading)


ORDER = (
    Claim(
        "With many shared prefixes lpm finds more of them in the cache than fcfs, produces more tokens "
        "per second and starts them sooner.",
        lambda c: (
            change(c, "shared-prefix", "hit %", "lpm", "fcfs") > 0.03
            and change(c, "shared-prefix", "out tok/s", "lpm", "fcfs") > 0.03
            and change(c, "shared-prefix", "TTFT p50", "lpm", "fcfs") < -0.05
        ),
    ),
    Claim(
        "Ageing holds lpm back under overload: a request that came in an earlier period of 5 s goes "
        "first. With 60 s more is found in the cache, and the median first token comes in about half "
        "the time that lpm needs with 5 s. The price is a bound on waiting that is twelve times as long.",
        lambda c: (
            change(c, "shared-prefix", "hit %", "lpm, ageing 60 s", "lpm") > 0
            and change(c, "shared-prefix", "TTFT p50", "lpm, ageing 60 s", "lpm") < -0.4
        ),
    ),
    Claim(
        "dfs-weight lies between fcfs and lpm in tokens per second, cache hits and first tokens: it "
        "turns to the branch with most requests, cached or not.",
        lambda c: all(
            0 < change(c, "shared-prefix", heading, "dfs-weight", "fcfs") * sign
            and 0 < change(c, "shared-prefix", heading, "lpm", "dfs-weight") * sign
            for heading, sign in (("out tok/s", 1), ("hit %", 1), ("TTFT p50", -1))
        ),
    ),
    Claim(
        "In conversations below saturation the order does not matter: throughput stays within 3 %.",
        lambda c: all(
            abs(change(c, "chat", "out tok/s", one.label, "fcfs")) < 0.03 for one in c["chat"]
        ),
    ),
    Claim(
        "Where nothing is shared, lpm and dfs-weight are fcfs to the last digit; where all requests ask "
        "for the same max_tokens, so is lof.",
        lambda c: (
            are_equal(c, "long-tail", "fcfs", "lpm", "dfs-weight")
            and are_equal(c, "chat", "fcfs", "lof")
        ),
    ),
    Claim(
        "lof and random are unfair: on long-tail their p99 of first tokens is over half as late again "
        "as under fcfs, though the median is earlier. What lof gains by starting long requests early "
        "is under 8 % of throughput.",
        lambda c: (
            all(
                change(c, "long-tail", "TTFT p99", label, "fcfs") > 0.5
                and change(c, "long-tail", "TTFT p50", label, "fcfs") < 0
                for label in ("lof", "random")
            )
            and 0 < change(c, "long-tail", "out tok/s", "lof", "fcfs") < 0.08
        ),
    ),
)

CACHE = (
    Claim(
        "The cache is the largest single gain of this page: over 30 % more tokens per second with "
        "shared prefixes and over 10 % in conversations, with first tokens in less than half the time.",
        lambda c: (
            change(c, "shared-prefix", "out tok/s", "lru", "off") > 0.3
            and change(c, "chat", "out tok/s", "lru", "off") > 0.1
            and all(
                change(c, w, "TTFT p50", "lru", "off") < -0.5 for w in ("shared-prefix", "chat")
            )
        ),
    ),
    Claim(
        "ref_zero gets most of it while requests with one prefix overlap (shared-prefix), and far less "
        "in conversations, whose blocks no request holds between two turns.",
        lambda c: (
            change(c, "shared-prefix", "hit %", "ref_zero", "lru") > -0.15
            and change(c, "chat", "hit %", "ref_zero", "lru") < -0.25
        ),
    ),
    Claim(
        "Without anything to share the cache changes no decision: all three rows are equal.",
        lambda c: are_equal(c, "long-tail", "off", "ref_zero", "lru"),
    ),
)

CONSERVATIVENESS = (
    Claim(
        "The less is set aside, the more is served: 0.3 beats 1.0 and 1.0 beats 1.3 in tokens per "
        "second and in first tokens on all three workloads. These clients ask for several times what "
        "they use, which is when setting aside costs most; for clients that ask for what they need, "
        "less would change little. (0 sets aside nothing that is asked for beyond the prompt.)",
        lambda c: all(
            change(c, w, "out tok/s", "0.3", "1.0") > 0 > change(c, w, "out tok/s", "1.3", "1.0")
            and change(c, w, "TTFT p50", "0.3", "1.0") < 0 < change(c, w, "TTFT p50", "1.3", "1.0")
            for w in c
        ),
    ),
    Claim(
        "0 produces most of all in spite of its preemptions: computing a victim again is a chunk or "
        "two, and the machine is fuller all the time. It pays with the steadiness of tokens: on "
        "reasoning the p99 between tokens is over a third longer than at 1.0.",
        lambda c: (
            all(change(c, w, "out tok/s", "0", "1.0") > 0.02 for w in c)
            and mean(c, "reasoning", "preempted", "0") > 0
            and change(c, "reasoning", "ITL p99", "0", "1.0") > 0.33
        ),
    ),
    Claim(
        "From 0.3 up next to no request is preempted (under 2 % of what 0 preempts).",
        lambda c: all(
            mean(c, w, "preempted", label) <= 0.02 * mean(c, w, "preempted", "0")
            for w in c
            for label in ("0.3", "1.0", "1.3")
        ),
    ),
)

PREEMPTION = (
    Claim(
        "Swapping computes nothing again and is never slower here: tokens per second are within 3 % of "
        "recomputing on every workload.",
        lambda c: all(
            mean(c, w, "recomputed", "swap") <= 0.05 * mean(c, w, "recomputed", "recompute")
            and -0.01 < change(c, w, "out tok/s", "swap", "recompute") < 0.03
            for w in c
        ),
    ),
    Claim(
        "The difference is small because a victim is cheap to compute again: a chunk or two of 2,048 "
        "tokens. The longest pause between two tokens gets a little shorter (under 15 %).",
        lambda c: all(-0.15 < change(c, w, "ITL max", "swap", "recompute") < 0 for w in c),
    ),
)

VICTIMS = (
    Claim(
        "Throughput does not depend on which request is preempted: all rules are within 3 % everywhere.",
        lambda c: all(
            abs(change(c, w, "out tok/s", one.label, "fewest_generated")) < 0.03
            for w in c
            for one in c[w]
        ),
    ),
    Claim(
        "paused_budget computes less than half as much again on long-tail and reasoning, since a paused "
        "request keeps its blocks. On chat, where victims hold over 100 blocks each, a handful fills "
        "the budget, and as much is computed again as under the other rules.",
        lambda c: (
            all(
                mean(c, w, "recomputed", "paused_budget")
                < 0.5
                * min(mean(c, w, "recomputed", r) for r in ("fewest_generated", "last_admitted"))
                for w in ("long-tail", "reasoning")
            )
            and abs(
                mean(c, "chat", "recomputed", "paused_budget")
                / mean(c, "chat", "recomputed", "fewest_generated")
                - 1
            )
            < 0.1
        ),
    ),
    Claim(
        "fewest_generated and last_admitted mostly choose the same requests: the median request differs "
        "by under 3 %.",
        lambda c: all(
            abs(change(c, w, "e2e p50", "last_admitted", "fewest_generated")) < 0.03 for w in c
        ),
    ),
)

STEP = (
    Claim(
        "prefill-first brings the slowest first tokens forward by a few per cent and makes all others "
        "wait for it: the longest pause between two tokens grows at least fivefold wherever "
        "prompts are long, and the median request ends later.",
        lambda c: all(
            change(c, w, "TTFT p99", "prefill-first", "decode-first") < 0
            and change(c, w, "ITL max", "prefill-first", "decode-first") > 4
            and change(c, w, "e2e p50", "prefill-first", "decode-first") > 0
            for w in ("shared-prefix", "long-tail")
        ),
    ),
    Claim(
        "A prefill share of 0.25 is the opposite trade: the p99 between tokens falls by over 40 % and "
        "the median request ends sooner, while the slowest first tokens come later.",
        lambda c: all(
            change(c, w, "ITL p99", "decode-first, share 0.25", "decode-first") < -0.4
            and change(c, w, "e2e p50", "decode-first, share 0.25", "decode-first") < 0
            and change(c, w, "TTFT p99", "decode-first, share 0.25", "decode-first") > 0
            for w in ("shared-prefix", "long-tail")
        ),
    ),
    Claim(
        "Chunks of 256 let short prompts pass long ones: on long-tail the median first token comes "
        "sooner and the slowest later.",
        lambda c: (
            change(c, "long-tail", "TTFT p50", "decode-first, chunks of 256", "decode-first")
            < -0.03
            and change(c, "long-tail", "TTFT p99", "decode-first, chunks of 256", "decode-first")
            > 0
        ),
    ),
    Claim(
        "Throughput is the same for all (within 2 %), and in conversations, where a turn adds few "
        "tokens to what is cached, so is nearly everything else.",
        lambda c: all(
            abs(change(c, w, "out tok/s", one.label, "decode-first")) < 0.02
            for w in c
            for one in c[w]
        ),
    ),
)
