"""Summary of a simulation in numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.request.request import FinishReason
from tandem_simulator.recorder import FAILED, REFUSED, Recorder

PERCENTILES = (50, 90, 99)
MAX_POINTS = 200
"""Most points of the series over time."""


def summarize(
    recorder: Recorder,
    *,
    total_blocks: int,
    slo_ttft_s: float,
    slo_tpot_s: float,
    num_executors: int = 1,
) -> dict[str, Any]:
    """
    Return all numbers as plain values for JSON; a percentile of no values is None.

    Times are seconds; percentiles interpolate linearly, as numpy's do by default. The mean rows,
    decodes and tokens of steps weigh each step by its duration; of an executor with several stages
    that is the time of one stage. Steps that were lost with their executor count nowhere.
    """
    sent = slice(0, recorder.num_sent)
    arrival_s, end_s = recorder.arrival_s[sent], recorder.end_s[sent]
    done = recorder.end[sent] > 0
    ttft_s = recorder.first_token_s[sent] - arrival_s
    tpot_s = _time_per_token(recorder)
    is_good = done & (ttft_s <= slo_ttft_s) & ~(tpot_s > slo_tpot_s)
    duration_s = float(end_s.max() - arrival_s.min()) if recorder.num_sent else 0.0
    tokens = _tokens(recorder)
    return {
        "duration_s": duration_s,
        "requests": _requests(recorder),
        "throughput": {
            "requests_per_s": _ratio(np.count_nonzero(done), duration_s),
            "output_tokens_per_s": _ratio(tokens["output"], duration_s),
            "total_tokens_per_s": _ratio(tokens["output"] + tokens["prompt"], duration_s),
            "goodput_per_s": _ratio(np.count_nonzero(is_good), duration_s),
            "good_share": _ratio(np.count_nonzero(is_good), recorder.num_sent),
        },
        "ttft_s": _spread(ttft_s),
        "inter_token_s": _spread(recorder.inter_token_s),
        "tpot_s": _spread(tpot_s),
        "end_to_end_s": _spread((end_s - arrival_s)[done]),
        "queue_s": _spread(recorder.queue_s[sent]),
        "tokens": tokens,
        "memory": _memory(recorder, total_blocks),
        "steps": _steps(recorder, num_executors),
        "executors": [_executor(recorder, number) for number in range(num_executors)],
        "over_time": series(recorder),
    }


def _requests(recorder: Recorder) -> dict[str, Any]:
    end = recorder.end[: recorder.num_sent]
    return {
        "sent": recorder.num_sent,
        "finished": int(np.count_nonzero(end > 0)),
        "failed": int(np.count_nonzero(end == FAILED)),
        "refused": int(np.count_nonzero(end == REFUSED)),
        "ends": {
            reason.name.lower(): int(np.count_nonzero(end == reason))
            for reason in FinishReason
            if (end == reason).any()
        },
        "errors": dict(sorted(recorder.errors.items())),
    }


def _tokens(recorder: Recorder) -> dict[str, Any]:
    """Count tokens; a prompt counts once admitted, with the cached part of its first admission."""
    cached = recorder.cached_tokens[: recorder.num_sent]
    admitted = cached >= 0
    num_input = int(recorder.prompt_len[: recorder.num_sent][admitted].sum())
    num_cached = int(cached[admitted].sum())
    return {
        "prompt": num_input,
        "output": recorder.num_tokens,
        "cached": num_cached,
        "computed": int(recorder.work[:, 2].sum()),
        "recomputed": recorder.recomputed_tokens,
        "cache_hit_ratio": _ratio(num_cached, num_input),
    }


def _memory(recorder: Recorder, total_blocks: int) -> dict[str, Any]:
    preemptions, work = recorder.num_preemptions[: recorder.num_sent], recorder.work
    return {
        "preemptions": int(preemptions.sum()),
        "preempted_requests": int(np.count_nonzero(preemptions)),
        "copied_blocks": int(work[:, 3].sum()),
        "swapped_out_blocks": int(work[:, 4].sum()),
        "swapped_in_blocks": int(work[:, 5].sum()),
        **_kv_usage(recorder, total_blocks),
    }


def _steps(recorder: Recorder, num_executors: int) -> dict[str, Any]:
    work, step_s = recorder.work, recorder.step_s
    busy_s = np.bincount(recorder.step_executor, step_s, num_executors)
    return {
        "count": len(work),
        "busy_share": _ratio(step_s.sum(), _span_s(recorder) * num_executors),
        "imbalance": _ratio(busy_s.max(), float(busy_s.mean())),
        "mean_step_s": _ratio(step_s.sum(), len(work)),
        **_mean_work(work, step_s),
    }


def _executor(recorder: Recorder, number: int) -> dict[str, Any]:
    """Return the numbers of one executor; it has the requests that it was the first to admit."""
    mine = recorder.step_executor == number
    step_s = recorder.step_s[mine]
    admitted = recorder.executor[: recorder.num_sent] == number
    num_cached = recorder.cached_tokens[: recorder.num_sent][admitted].sum()
    return {
        "executor": number,
        "requests": int(np.count_nonzero(admitted)),
        "steps": len(step_s),
        "busy_share": _ratio(step_s.sum(), _span_s(recorder)),
        **_mean_work(recorder.work[mine], step_s),
        "cache_hit_ratio": _ratio(
            num_cached, float(recorder.prompt_len[: recorder.num_sent][admitted].sum())
        ),
    }


def _mean_work(work: NDArray[np.int64], step_s: NDArray[np.float64]) -> dict[str, float]:
    columns = {"mean_rows": 0, "mean_decodes": 1, "mean_tokens": 2}
    return {
        name: _ratio((work[:, column] * step_s).sum(), step_s.sum())
        for name, column in columns.items()
    }


def series(recorder: Recorder) -> dict[str, list[float | int]]:
    """Return the core's state over time, in at most `MAX_POINTS` points spread over the samples."""
    samples = recorder.samples
    count = min(len(samples), MAX_POINTS)
    picked = [samples[i] for i in np.linspace(0, len(samples) - 1, count).round().astype(int)]
    return {
        "time_s": [round(sample.time_s, 6) for sample in picked],
        "used_blocks": [sample.used_blocks for sample in picked],
        "cached_blocks": [sample.cached_blocks for sample in picked],
        "running": [sample.running for sample in picked],
        "waiting": [sample.waiting for sample in picked],
    }


def _time_per_token(recorder: Recorder) -> NDArray[np.float64]:
    """Return each completion's mean gap between tokens, NaN under two tokens, shape ``[sent]``."""
    sent = slice(0, recorder.num_sent)
    num_gaps = recorder.num_outputs[sent] - 1.0
    num_gaps[num_gaps < 1] = np.nan
    span_s: NDArray[np.float64] = recorder.last_token_s[sent] - recorder.first_token_s[sent]
    return span_s / num_gaps


def _span_s(recorder: Recorder) -> float:
    """Return the seconds from the first arrival to the end of the last step of any executor."""
    if not len(recorder.step_s):
        return 0.0
    last_s = float((recorder.step_start_s + recorder.step_s).max())
    return last_s - float(recorder.arrival_s[: recorder.num_sent].min())


def _kv_usage(recorder: Recorder, total_blocks: int) -> dict[str, float]:
    used = np.array([sample.used_blocks for sample in recorder.samples], np.float64)
    times = np.array([sample.time_s for sample in recorder.samples])
    span_s = times[-1] - times[0] if len(times) else 0.0
    mean = (used[:-1] * np.diff(times)).sum() / span_s if span_s > 0 else 0.0
    return {
        "total_blocks": total_blocks,
        "mean_kv_usage": float(mean / total_blocks),
        "peak_kv_usage": float(used.max(initial=0.0) / total_blocks),
    }


def _spread(values: NDArray[np.float64]) -> dict[str, float | None]:
    known = values[~np.isnan(values)]
    if not len(known):
        return dict.fromkeys(("mean", *(f"p{rank}" for rank in PERCENTILES), "max"))
    ranks = np.percentile(known, PERCENTILES).tolist()
    named = {f"p{rank}": value for rank, value in zip(PERCENTILES, ranks, strict=True)}
    return {"mean": float(known.mean()), **named, "max": float(known.max())}


def _ratio(numerator: float | np.number[Any], denominator: float) -> float:
    return float(numerator / denominator) if denominator else 0.0
