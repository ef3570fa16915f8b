"""Results as text for users."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem_simulator.results.comparison import Outcome

_TIMES = {
    "ttft_s": "first token, ms",
    "inter_token_s": "next token, ms",
    "tpot_s": "per token, ms",
    "queue_s": "queue, ms",
    "end_to_end_s": "request, ms",
}
_RANKS = ("mean", "p50", "p90", "p99", "max")
MEASURES: tuple[tuple[str, str, str], ...] = (
    ("output tokens/s", "throughput.output_tokens_per_s", ",.0f"),
    ("requests/s in time", "throughput.goodput_per_s", ".2f"),
    ("TTFT p50, ms", "ttft_s.p50", "ms"),
    ("TTFT p99, ms", "ttft_s.p99", "ms"),
    ("ITL p50, ms", "inter_token_s.p50", "ms"),
    ("ITL p99, ms", "inter_token_s.p99", "ms"),
    ("request p50, ms", "end_to_end_s.p50", "ms"),
    ("rows per step", "steps.mean_rows", ".1f"),
    ("busy time, max / mean", "steps.imbalance", ".2f"),
    ("preemptions", "memory.preemptions", ",d"),
    ("recomputed tokens", "tokens.recomputed", ",d"),
    ("prefix cache hits, %", "tokens.cache_hit_ratio", "percent"),
    ("KV cache used, %", "memory.mean_kv_usage", "percent"),
)
"""Lines of a comparison: name with unit, path in the results, and format."""
LINE_WIDTH = 80


def describe(outcome: Outcome) -> str:
    """Describe one simulation in several lines."""
    results, settings = outcome.results, outcome.settings
    requests, rates = results["requests"], results["throughput"]
    tokens, memory, steps = results["tokens"], results["memory"], results["steps"]
    ends = [f"{count} {reason}" for reason, count in requests["ends"].items()]
    ends += [f"{count} x {reason}" for reason, count in requests["errors"].items()]
    return f"""\
requests    {requests["sent"]} sent, {requests["finished"]} finished, {requests["failed"]} failed, \
{requests["refused"]} refused in {results["duration_s"]:.1f} virtual seconds ({", ".join(ends)})
throughput  {rates["requests_per_s"]:.2f} requests/s, {rates["output_tokens_per_s"]:,.0f} output \
tokens/s, {rates["total_tokens_per_s"]:,.0f} tokens/s in all
goodput     {rates["goodput_per_s"]:.2f} requests/s ({rates["good_share"]:.1%}) with a first token \
within {settings["slo_ttft_s"]:g} s and {settings["slo_tpot_s"]:g} s per further one

{_times_table(results)}

steps       {steps["count"]}, {_busy(results)} busy {steps["busy_share"]:.1%}, mean \
{steps["mean_step_s"] * 1e3:.2f} ms, {steps["mean_rows"]:.1f} rows ({steps["mean_decodes"]:.1f} \
decodes), {steps["mean_tokens"]:.0f} tokens
prompts     {tokens["prompt"]:,} tokens, {tokens["cached"]:,} from the cache \
({tokens["cache_hit_ratio"]:.1%}); {tokens["recomputed"]:,} tokens computed again
memory      KV in use {memory["mean_kv_usage"]:.1%} of {memory["total_blocks"]:,} blocks (peak \
{memory["peak_kv_usage"]:.1%}), {memory["preemptions"]} preemptions of \
{memory["preempted_requests"]} requests, blocks swapped {memory["swapped_out_blocks"]:,} out and \
{memory["swapped_in_blocks"]:,} in, {memory["copied_blocks"]:,} copied{_executors_table(results)}"""


def compare(outcomes: Sequence[Outcome]) -> str:
    """Return a table with one column per simulation, in as many parts as keep its lines short."""
    names = list(outcomes[0].varied)
    title = max(len(name) for name in (*names, *(name for name, _, _ in MEASURES)))
    columns = [[*one.varied.values(), *cells(one.results)] for one in outcomes]
    widths = [max(map(len, column)) + 2 for column in columns]
    parts, first = [], 0
    while first < len(columns):
        last = first + 1
        while last < len(columns) and title + sum(widths[first : last + 1]) <= LINE_WIDTH:
            last += 1
        parts.append(
            "\n".join(
                name.ljust(title)
                + "".join(
                    column[line].rjust(width)
                    for column, width in zip(columns[first:last], widths[first:last], strict=True)
                )
                for line, name in enumerate((*names, *(name for name, _, _ in MEASURES)))
            )
        )
        first = last
    return "\n\n".join(parts)


def is_without_difference(outcomes: Sequence[Outcome]) -> bool:
    """Return True where all simulations give the same printed numbers."""
    return len(outcomes) > 1 and all(
        cells(one.results) == cells(outcomes[0].results) for one in outcomes
    )


def cells(results: dict[str, Any]) -> list[str]:
    """Return the `MEASURES` of one simulation."""
    return [_cell(lookup(results, path), form) for _, path, form in MEASURES]


def lookup(results: dict[str, Any], path: str) -> Any:
    """Return the value at a dotted path."""
    value: Any = results
    for key in path.split("."):
        value = value[key]
    return value


def _cell(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    if form == "ms":
        return f"{value * 1e3:,.1f}"
    if form == "percent":
        return f"{value * 100:.1f}"
    return f"{value:{form}}"


def _busy(results: dict[str, Any]) -> str:
    count = len(results["executors"])
    return "executor" if count == 1 else f"{count} executors"


def _executors_table(results: dict[str, Any]) -> str:
    """Return a line per executor, with an empty line before them; nothing for one executor."""
    executors = results["executors"]
    if len(executors) == 1:
        return ""
    names = ("requests", "steps", "busy, %", "rows", "cache hits, %")
    imbalance = f"   (busy time, max / mean: {results['steps']['imbalance']:.2f})"
    lines = ["\n\nexecutor " + "".join(name.rjust(14) for name in names) + imbalance]
    for one in executors:
        cells = (
            f"{one['requests']:,d}",
            f"{one['steps']:,d}",
            f"{one['busy_share'] * 100:.1f}",
            f"{one['mean_rows']:.1f}",
            f"{one['cache_hit_ratio'] * 100:.1f}",
        )
        lines.append(f"{one['executor']:<9d}{''.join(cell.rjust(14) for cell in cells)}")
    return "\n".join(lines)


def _times_table(results: dict[str, Any]) -> str:
    lines = [" " * 18 + "".join(rank.rjust(11) for rank in _RANKS)]
    for key, title in _TIMES.items():
        values = "".join(_cell(results[key][rank], "ms").rjust(11) for rank in _RANKS)
        lines.append(title.ljust(18) + values)
    return "\n".join(lines)
