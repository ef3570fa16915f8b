"""Named starting points for the settings of both services."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from tandem.engine_config import PRESETS

PresetName = Literal[
    "low-latency",
    "high-throughput",
    "memory-constrained",
    "long-context",
    "deploy-throughput",
    "deploy-latency",
    "deploy-tight-memory",
]

PRESET_SETTINGS: Mapping[str, Mapping[str, int | float]] = {
    **{name: config.as_dict() for name, config in PRESETS.items()},
    "deploy-throughput": {"gpu_memory_utilization": 0.95},
    "deploy-latency": {"max_batch_size": 16},
    "deploy-tight-memory": {"gpu_memory_utilization": 0.8},
}
"""
Settings of each preset; a value set by any other source wins. The first four presets are whole sets
of engine limits, the others change one setting for a kind of deployment.
"""
