"""The engine limits in force for one model."""

from __future__ import annotations

from dataclasses import replace

import structlog

from executor_svc.config import LoadedSettings
from executor_svc.model import ModelConfig
from tandem.engine_config import EngineConfig
from tandem.errors import InvalidConfig

_log = structlog.get_logger(__name__)


def num_slots_for(limits: EngineConfig) -> int:
    """Slots of an executor: rows that compute, and as many that are paused or draining."""
    return 2 * limits.max_batch_size


def may_shorten(loaded: LoadedSettings) -> bool:
    """Tell whether max_model_len gives way to the KV memory: nobody asked for this very value."""
    return loaded.settings.max_model_len is None or not loaded.is_set("max_model_len")


def fit_limits(loaded: LoadedSettings, config: ModelConfig) -> EngineConfig:
    """
    Join the limits with the model's longest sequence, which is the default; a preset's gives way
    to it, a set value does not.

    Raises:
        InvalidConfig: A length was set that the model does not support, or a rule fails with the
            model's length.
    """
    limits, longest = loaded.limits, config.context_len
    if loaded.settings.max_model_len is None:
        limits = replace(limits, max_model_len=longest)
    elif limits.max_model_len > longest:
        if loaded.is_set("max_model_len"):
            raise InvalidConfig(
                f"max_model_len is set to {limits.max_model_len} "
                f"({loaded.places['max_model_len']}), but the model supports at most {longest} "
                f"tokens (max_position_embeddings): lower max_model_len to {longest} or less"
            )
        limits = replace(limits, max_model_len=longest)
    limits.validate()
    for warning in limits.warnings():
        _log.warning("unusual_setting", what=warning)
    return limits
