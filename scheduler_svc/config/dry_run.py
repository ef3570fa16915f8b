"""`--dry-run`: the limits, as far as a scheduler knows them without its executor."""

from __future__ import annotations

import json
import math

from scheduler_svc.config.settings import LoadedSettings
from tandem.engine_config import EngineConfig
from tandem.settings.schema import LIMITS

_SCHEDULERS_OWN = ("max_num_seqs", "memory_threshold")
"""Limits that do not depend on the executor."""


def forecast(loaded: LoadedSettings) -> dict[str, object]:
    """
    Return the limits, which of them are final, and what a KV cache of `max_num_blocks` holds.

    A limit that is not set follows the executor, unless it is the scheduler's own; one that is set
    or comes from a preset is an upper bound.
    """
    settings = loaded.settings
    limits = [
        {
            "name": name,
            "value": getattr(settings, name),
            "source": loaded.sources.get(name, "default"),
            "follows_executor": name not in loaded.sources and name not in _SCHEDULERS_OWN,
        }
        for name in LIMITS
    ]
    config = settings.engine_config()
    return {
        "executor": settings.executor,
        "limits": limits,
        **_held_by(settings.max_num_blocks, settings.max_model_len, config),
        "warnings": config.warnings(),
    }


def _held_by(
    num_blocks: int | None, longest: int | None, config: EngineConfig
) -> dict[str, int | None]:
    """Return how much so many blocks hold; None for values that only the executor knows."""
    if num_blocks is None:
        return {"tokens": None, "longest_requests": None, "blocks_at_threshold": None}
    return {
        "tokens": num_blocks * config.block_size,
        "longest_requests": (
            None if longest is None else num_blocks // math.ceil(longest / config.block_size)
        ),
        "blocks_at_threshold": math.ceil(config.memory_threshold * num_blocks),
    }


def as_text(forecasted: dict[str, object]) -> str:
    """Return a forecast as text for users."""
    limits, warnings = forecasted["limits"], forecasted["warnings"]
    assert isinstance(limits, list)
    assert isinstance(warnings, list)
    lines = ["limits, as far as they are known without the executor at {executor}:"]
    for limit in limits:
        what = "or the executor's" if limit["follows_executor"] else limit["source"]
        value = "the executor's" if limit["value"] is None else f"{limit['value']} ({what})"
        lines.append(f"  {limit['name']} = {value}")
    if forecasted["tokens"] is not None:
        lines.append("with that many blocks the KV memory holds {tokens} tokens;")
    if forecasted["longest_requests"] is not None:
        lines.append("these are {longest_requests} of the longest requests;")
    if forecasted["blocks_at_threshold"] is not None:
        lines.append("no prompt is admitted while {blocks_at_threshold} blocks or more are in use")
    lines += [
        "the executor's own --dry-run tells what takes how much of its memory",
        *(f"warning: {warning}" for warning in warnings),
    ]
    return "\n".join(lines).format_map(forecasted) + "\n"


def as_json(forecasted: dict[str, object]) -> str:
    """Return a forecast as one line of JSON."""
    return json.dumps(forecasted) + "\n"
