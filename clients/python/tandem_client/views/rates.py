"""Rates and means of a server's counters between two snapshots."""

from __future__ import annotations

from dataclasses import dataclass

from tandem_client.admin import Stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """
    Rates and means of the time between two snapshots; None if there is nothing to measure.

    Attributes:
        window_s: Seconds between the snapshots; 0 if there is only one.
        output_tokens_per_s: Output tokens per second.
        prompt_tokens_per_s: Prompt tokens computed per second.
        requests_per_s: Requests finished per second.
        steps_per_s: Steps of the executor per second.
        ttft_ms: Mean time to first token.
        itl_ms: Mean time between two output tokens of a request.
        prefix_cache_hit_share: Share of prompt tokens found in the prefix cache, 0 to 1.
        forward_ms: Mean time of a step's forward pass.
        sample_ms: Mean time of a step's sampling.
        queued_ms: Mean wait of a step at the executor, sent ahead of its turn.
        graph_share: Share of steps that CUDA graphs computed, 0 to 1.
    """

    window_s: float
    output_tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    requests_per_s: float | None
    steps_per_s: float | None
    ttft_ms: float | None
    itl_ms: float | None
    prefix_cache_hit_share: float | None
    forward_ms: float | None
    sample_ms: float | None
    queued_ms: float | None
    graph_share: float | None


def rates_between(now: Stats, before: Stats | None) -> Rates:
    """Return the rates since `before`; None = there is no earlier snapshot."""
    window_s = 0.0 if before is None else now.uptime_s - before.uptime_s

    def gained(name: str) -> float:
        value: float = 0.0 if before is None else getattr(now, name) - getattr(before, name)
        return value

    def rate(name: str) -> float | None:
        return gained(name) / window_s if window_s > 0 else None

    def mean(total: str, count: str, scale: float = 1.0) -> float | None:
        return scale * gained(total) / gained(count) if gained(count) > 0 else None

    return Rates(
        window_s=window_s,
        output_tokens_per_s=rate("output_tokens"),
        prompt_tokens_per_s=rate("prefill_tokens"),
        requests_per_s=rate("finished_requests"),
        steps_per_s=rate("steps"),
        ttft_ms=mean("time_to_first_token_s", "first_tokens", 1000),
        itl_ms=mean("inter_token_s", "next_tokens", 1000),
        prefix_cache_hit_share=mean("prefix_cache_hit_tokens", "prefix_cache_lookup_tokens"),
        forward_ms=mean("executor_forward_s", "steps", 1000),
        sample_ms=mean("executor_sample_s", "steps", 1000),
        queued_ms=mean("executor_queued_s", "steps", 1000),
        graph_share=mean("graph_steps", "steps"),
    )
