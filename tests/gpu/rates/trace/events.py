"""The figures of a trace of steps: time in kernels, gaps between them, and shares of operations."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LONGEST_NAME = 100

OPERATIONS: Mapping[str, re.Pattern[str]] = {
    "begin and end": re.compile(r"gather_rows|advance_rows|patch_rows"),
    "sampling": re.compile(
        r"^_?(best|greedy|draw|choose|weigh|collect|search|bias|penalise|part)_kernel"
        r"|argmax|multinomial|tandem\.sample"
    ),
    "attention": re.compile(
        r"decode_kernel|prefill_kernel|merge_kernel|attention|flash|fmha", re.IGNORECASE
    ),
    "norms": re.compile(r"rms_norm", re.IGNORECASE),
    "rope and KV writes": re.compile(r"rope", re.IGNORECASE),
    "silu": re.compile(r"silu", re.IGNORECASE),
    "products": re.compile(
        r"gemm|gemv|nvjet|cutlass|cublas|splitk|linear|aten::(mm|addmm|matmul|bmm)\b", re.IGNORECASE
    ),
    "copies": re.compile(r"memcpy|memset|aten::(copy_|to|fill_|zero_)\b", re.IGNORECASE),
}
"""Operations by a pattern of the names of their kernels or CPU functions; the first that fits."""


@dataclass(frozen=True, slots=True)
class Span:
    """
    One kernel or copy on a device, or on a CPU one function that no other had called.

    Attributes:
        name: Name of the kernel.
        begin_us: Begin in microseconds.
        end_us: End in microseconds.
        stream: Stream of the device, or thread of the CPU.
    """

    name: str
    begin_us: float
    end_us: float
    stream: int


def spans_of(trace: Mapping[str, Any], *, on_device: bool) -> list[Span]:
    """
    Return the spans of a Chrome trace of PyTorch's profiler, by their begin.

    Args:
        trace: The trace, as its JSON is read.
        on_device: Return kernels and copies of a GPU; otherwise functions on the CPU.
    """
    kinds = _ON_DEVICE if on_device else {"cpu_op"}
    found = [
        Span(
            event["name"],
            float(event["ts"]),
            float(event["ts"]) + float(event["dur"]),
            int(event.get("args", {}).get("stream", event["tid"])),
        )
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in kinds
    ]
    found.sort(key=lambda span: (span.begin_us, -span.end_us))
    return found if on_device else _outermost(found)


def _outermost(spans: Iterable[Span]) -> list[Span]:
    """Leave out spans within another of the same thread: functions that a function called."""
    ends: dict[int, float] = {}
    kept = []
    for span in spans:
        if span.end_us > ends.get(span.stream, float("-inf")):
            kept.append(span)
            ends[span.stream] = span.end_us
    return kept


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which nothing ran, and the kernels around it."""

    us: float
    before: str
    after: str


def gaps_of(spans: Sequence[Span]) -> list[Gap]:
    """Return the gaps between spans, which are sorted by their begin; those that overlap have none."""
    gaps = []
    last: Span | None = None
    for span in spans:
        if last is not None and span.begin_us > last.end_us:
            gaps.append(Gap(span.begin_us - last.end_us, last.name, span.name))
        if last is None or span.end_us > last.end_us:
            last = span
    return gaps


def operation_of(name: str, before: str = "") -> str:
    """Return the operation of a kernel; `before` names the kernel in front of it on its stream."""
    if "merge_kernel" in name and "linear_kernel" in before:
        return "products"
    return next((kind for kind, names in OPERATIONS.items() if names.search(name)), "other")


def shares(spans: Sequence[Span]) -> dict[str, float]:
    """Return the share of each operation in the time of all spans, largest first."""
    time_us: defaultdict[str, float] = defaultdict(float)
    befores = ["", *(before.name for before, _ in pairwise(spans))]
    for span, before in zip(spans, befores, strict=True):
        time_us[operation_of(span.name, before)] += span.end_us - span.begin_us
    total = sum(time_us.values())
    largest_first = sorted(time_us.items(), key=lambda item: -item[1])
    return {kind: round(spent / total, 4) for kind, spent in largest_first} if total else {}


def summary(
    spans: Sequence[Span], num_steps: int, *, num_gaps: int = 8, num_top: int = 10
) -> dict[str, Any]:
    """
    Return the figures of a recording, times per step and in microseconds.

    Args:
        spans: Spans of all its steps, sorted by their begin.
        num_steps: Number of steps, with nothing before the first and after the last.
        num_gaps: Number of gaps to name, largest first; those between the same kernels are one,
            with their count per step and their median.
        num_top: Number of kernels to name, by their time.
    """
    if not spans:
        return {"kernels": 0}
    first, last = spans[0].begin_us, max(span.end_us for span in spans)
    gaps = gaps_of(spans)
    streams: defaultdict[int, list[Span]] = defaultdict(list)
    for span in spans:
        streams[span.stream].append(span)
    by_stream = {
        str(stream): round(sum(gap.us for gap in gaps_of(own)) / num_steps, 2)
        for stream, own in sorted(streams.items())
    }
    return {
        "step_us": round((last - first) / num_steps, 2),
        "kernels": round(len(spans) / num_steps, 2),
        "kernel_us": round(sum(span.end_us - span.begin_us for span in spans) / num_steps, 2),
        "gap_us": round(sum(gap.us for gap in gaps) / num_steps, 2),
        "gap_us_by_stream": by_stream,
        "gaps": _largest(gaps, num_steps, num_gaps),
        "top": _top(spans, num_steps, num_top),
        "shares": shares(spans),
    }


def _largest(gaps: Sequence[Gap], num_steps: int, most: int) -> list[dict[str, Any]]:
    alike: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for gap in gaps:
        alike[gap.before, gap.after].append(gap.us)
    largest = sorted(alike.items(), key=lambda item: -sum(item[1]))[:most]
    return [
        {
            "before": before[:_LONGEST_NAME],
            "after": after[:_LONGEST_NAME],
            "count": round(len(each) / num_steps, 2),
            "us": round(sum(each) / num_steps, 2),
            "median_us": round(sorted(each)[len(each) // 2], 2),
            "largest_us": round(max(each), 2),
        }
        for (before, after), each in largest
    ]


def _top(spans: Sequence[Span], num_steps: int, most: int) -> list[dict[str, Any]]:
    alike: defaultdict[str, list[float]] = defaultdict(list)
    for span in spans:
        alike[span.name].append(span.end_us - span.begin_us)
    largest = sorted(alike.items(), key=lambda item: -sum(item[1]))[:most]
    return [
        {
            "name": name[:_LONGEST_NAME],
            "count": round(len(each) / num_steps, 2),
            "us": round(sum(each) / num_steps, 2),
        }
        for name, each in largest
    ]
