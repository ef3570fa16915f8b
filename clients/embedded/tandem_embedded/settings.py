"""Checks of an engine's settings, done before anything is allocated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from scheduler_svc.core.request.options import CoreOptions, OnPressure
from tandem.bundled_model import bundled_model
from tandem.engine_config import MAX_GIB, EngineConfig
from tandem.errors import InvalidConfig
from tandem.link.commands import KvMode

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


def checked_settings(
    config: EngineConfig | None,
    options: CoreOptions | None,
    window: int,
    buffer_size_gb: float | None,
) -> CoreOptions:
    """
    Check limits, scheduling options, window and KV memory; returns the options with that window.
    Without options they are those of a service, but requests at memory_threshold are refused.

    Raises:
        InvalidConfig: One of them is wrong, as for the functions below.
    """
    check_config(config)
    check_buffer(config, buffer_size_gb)
    if options is None:
        options = CoreOptions(on_pressure=OnPressure.REFUSE)
    return checked_options(options, window)


def check_config(config: EngineConfig | None) -> None:
    """
    Check the limits, if any are given.

    Raises:
        InvalidConfig: A limit is out of range, or `config` is not an EngineConfig.
    """
    given: Any = config
    if given is None:
        return
    if not isinstance(given, EngineConfig):
        message = (
            f"config must be an EngineConfig, got {given!r}: the model is the second argument, "
            "InferenceEngine(EngineConfig(), model_dir)"
        )
        raise InvalidConfig(message, field="config")
    given.validate()


def checked_options(options: CoreOptions, window: int) -> CoreOptions:
    """
    Check the scheduling options and an engine's window; returns the options with that window.

    Raises:
        InvalidConfig: A value is out of range, or would have no effect in one process.
    """
    for name in ("window", "run_ahead"):
        value = getattr(options, name)
        if value != getattr(CoreOptions(), name):
            message = (
                f"CoreOptions.{name} is {value}, which has no effect in an embedded engine: no "
                "result is under way to it that a step could be sent ahead of; give "
                "InferenceEngine(window=...) to plan steps before earlier ones are applied"
            )
            raise InvalidConfig(message, field=name)
    options = replace(options, window=window, run_ahead=window)
    options.validate()
    return options


def check_buffer(config: EngineConfig | None, buffer_size_gb: float | None) -> None:
    """
    Check the size of the KV memory in GiB, if it is given.

    Raises:
        InvalidConfig: The size is out of range, or the number of blocks is given as well.
    """
    if buffer_size_gb is None:
        return
    if config is not None and config.max_num_blocks != EngineConfig().max_num_blocks:
        message = (
            f"max_num_blocks ({config.max_num_blocks}) and buffer_size_gb ({buffer_size_gb:g}) set "
            "the same: keep one of them"
        )
        raise InvalidConfig(message, field="buffer_size_gb")
    if not 0 < buffer_size_gb <= MAX_GIB:
        message = f"buffer_size_gb must be over 0 and at most {MAX_GIB}, got {buffer_size_gb}"
        raise InvalidConfig(message, field="buffer_size_gb")


def kv_mode(name: str) -> KvMode:
    """
    Return the mode of a name for `kv_cache_management_mode`.

    Raises:
        InvalidConfig: There is no mode of this name.
    """
    known = {mode.name.lower(): mode for mode in KvMode}
    if name not in known:
        message = f"kv_cache_management_mode is {name!r}: choose one of {', '.join(known)}"
        raise InvalidConfig(message, field="kv_cache_management_mode")
    return known[name]


def model_directory(given: Path | str | None) -> Path:
    """
    Return the directory of the model to load: the given one, or that of the bundled model.

    Raises:
        InvalidConfig: None is given, and this installation has no bundled model.
    """
    if given is not None:
        return Path(given)
    found = bundled_model()
    if found is None:
        message = (
            "no model is given and this installation has no bundled one: "
            "InferenceEngine(config, model_dir) takes a directory in Hugging Face format"
        )
        raise InvalidConfig(message, field="model_dir")
    _log.warning("bundled_model_used", model_dir=str(found), why="no model_dir was given")
    return found
