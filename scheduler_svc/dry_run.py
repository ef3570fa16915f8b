"""`--dry-run`: the limits as far as a scheduler knows them without its executor."""

from __future__ import annotations

import json
import math

from scheduler_svc.config import LoadedSettings
from tandem.settings.schema import LIMITS

_SCHEDULERS_OWN = ("max_num_seqs", "memory_threshold")
"""Limits that no executor changes."""


def forecast(loaded: LoadedSettings) -> dict[str, object]:
    """
    The limits, which of them are final, and what a KV memory of that size would hold.

    A limit that nobody set follows the executor; one that was set or comes from a preset is an
    upper bound.
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
    blocks_per_request = math.ceil(config.max_model_len / config.block_size)
    return {
        "executor": settings.executor,
        "limits": limits,
        "tokens": config.max_num_blocks * config.block_size,
        "longest_requests": config.max_num_blocks // blocks_per_request,
        "blocks_at_threshold": math.ceil(config.memory_threshold * config.max_num_blocks),
        "warnings": config.warnings(),
    }


def as_text(forecasted: dict[str, object]) -> str:
    """A forecast for people."""
    limits, warnings = forecasted["limits"], forecasted["warnings"]
    assert isinstance(limits, list)
    assert isinstance(warnings, list)
    lines = ["limits, as far as they are known without the executor at {executor}:"]
    for limit in limits:
        what = "or the executor's" if limit["follows_executor"] else limit["source"]
        lines.append(f"  {limit['name']} = {limit['value']} ({what})")
    lines += [
        "with that many blocks the KV memory holds {tokens} tokens,",
        "or {longest_requests} of the longest requests;",
        "no prompt is admitted while {blocks_at_threshold} blocks or more are in use",
        "the executor's own --dry-run tells what takes how much of its memory",
        *(f"warning: {warning}" for warning in warnings),
    ]
    return "\n".join(lines).format_map(forecasted) + "\n"


def as_json(forecasted: dict[str, object]) -> str:
    """A forecast for programs: one line."""
    return json.dumps(forecasted) + "\n"
