"""Activity of a server over an interval, from snapshots of its counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem_client.admin import Stats


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
        executors: Number of executors that serve together.
        busy_share: Share of the time that an executor computes steps, on average, 0 to 1; None = no
            step came back.
        step_s: Average seconds of a step; None = no step came back.
        inter_token_s: Average seconds between two tokens of a request; None = none had two.
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
    executors: int
    busy_share: float | None
    step_s: float | None
    inter_token_s: float | None
    schedule_policy: str
    max_batch_size: int
    conservativeness: float
    prompt_chunk: int | None

    @property
    def retractions_per_minute(self) -> float:
        """Rate of retractions."""
        return 60 * self.retractions / self.seconds

    @property
    def places(self) -> int:
        """Most sequences that run at a time, on all executors."""
        return self.executors * self.max_batch_size

    @property
    def is_idle(self) -> bool:
        """True if the server had no request, running or waiting."""
        return self.running + self.waiting == 0


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
    steps, next_tokens = last.steps - first.steps, last.next_tokens - first.next_tokens
    computed_s = last.executor_forward_s - first.executor_forward_s
    computed_s += last.executor_sample_s - first.executor_sample_s
    executors = len(str(settings.get("executor") or "").split(","))
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
        executors=executors,
        busy_share=computed_s / seconds / executors if steps else None,
        step_s=computed_s / steps if steps else None,
        inter_token_s=(last.inter_token_s - first.inter_token_s) / next_tokens
        if next_tokens
        else None,
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


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
