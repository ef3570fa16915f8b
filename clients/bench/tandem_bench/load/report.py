"""Report of a load test, joined from the measurements of its processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem_bench.load.worker import Outcomes

PERCENTILES = (50, 90, 99)


def summarize(outcomes: Sequence[Outcomes]) -> dict[str, Any]:
    """
    Join the outcomes of all processes.

    Returns:
        `output_tokens_per_s` from the first request's start to the last token, `ttft_ms` (time to
        first token), `itl_ms` (inter-token latency), `e2e_ms` (whole requests) each with p50, p90
        and p99, which are None without a measurement, `errors` (failed requests) and `requests`
        (requests that ended, failed or not).
    """
    tokens = sum(one.num_tokens for one in outcomes)
    start_s = min((one.first_start_s for one in outcomes), default=0.0)
    elapsed_s = max((one.last_token_s for one in outcomes), default=0.0) - start_s
    errors = sum(sum(one.errors.values()) for one in outcomes)
    return {
        "output_tokens_per_s": tokens / elapsed_s if elapsed_s > 0 else 0.0,
        "ttft_ms": percentiles([ms for one in outcomes for ms in one.ttft_ms]),
        "itl_ms": percentiles([ms for one in outcomes for ms in one.itl_ms]),
        "e2e_ms": percentiles([ms for one in outcomes for ms in one.e2e_ms]),
        "errors": errors,
        "requests": sum(one.num_done for one in outcomes) + errors,
    }


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Return p50, p90 and p99 of the values, interpolated; None for each without a value."""
    if not values:
        return {f"p{q}": None for q in PERCENTILES}
    found = np.percentile(np.asarray(values), PERCENTILES)
    return {f"p{q}": round(float(value), 3) for q, value in zip(PERCENTILES, found, strict=True)}


def errors_by_reason(outcomes: Sequence[Outcomes]) -> dict[str, int]:
    """Return the number of errors by reason, most frequent first."""
    joined: dict[str, int] = {}
    for one in outcomes:
        for reason, count in one.errors.items():
            joined[reason] = joined.get(reason, 0) + count
    return dict(sorted(joined.items(), key=lambda item: (-item[1], item[0])))
