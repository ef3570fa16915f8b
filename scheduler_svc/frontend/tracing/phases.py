"""Phases of a choice: its time in the queue, its prefill and its decode."""

from __future__ import annotations

from dataclasses import dataclass, field

from opentelemetry.util.types import AttributeValue

from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.ipc.messages import StreamEnd


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase, with times of the service's clock in seconds and attributes of its span."""

    name: str
    begin_s: float
    end_s: float
    attributes: dict[str, AttributeValue] = field(default_factory=dict)


@dataclass(slots=True)
class Seen:
    """Times at which progress of a choice came, for one that ends without the core's times."""

    scheduled_s: float | None = None
    prefilled_s: float | None = None
    num_scheduled: int = 0


def phases_by_core(end: StreamEnd, arrival_s: float) -> list[Phase]:
    """Return the phases of a choice that ended, by the core's account of it."""
    total_s = arrival_s + end.total_s
    scheduled_s = arrival_s + end.queue_s
    first_s = total_s if end.first_token_s is None else arrival_s + end.first_token_s
    phases = [Phase("queue", arrival_s, scheduled_s)]
    if scheduled_s < total_s:
        tokens: dict[str, AttributeValue] = {
            "gen_ai.usage.input_tokens": end.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": end.num_cached_tokens,
        }
        phases.append(Phase("prefill", scheduled_s, first_s, tokens))
    if end.first_token_s is not None:
        values: dict[str, AttributeValue] = {
            "gen_ai.usage.output_tokens": end.num_output_tokens,
            "gen_ai.response.finish_reasons": (FinishReason(end.reason).name,),
        }
        phases.append(Phase("decode", first_s, total_s, values))
    return phases


def phases_by_progress(seen: Seen, arrival_s: float, now_s: float) -> list[Phase]:
    """Return the phases until now of a choice without the core's account, by its progress."""
    scheduled_s, prefilled_s = seen.scheduled_s, seen.prefilled_s
    phases = [Phase("queue", arrival_s, scheduled_s or now_s)]
    if scheduled_s is not None:
        phases.append(Phase("prefill", scheduled_s, prefilled_s or now_s))
    if prefilled_s is not None:
        phases.append(Phase("decode", prefilled_s, now_s))
    return phases
