"""Answers about the model and about the schedulers."""

from __future__ import annotations

from typing import Literal

import msgspec


class ModelBody(msgspec.Struct, kw_only=True):
    """A model, as /v1/models describes it; `root` is its revision."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tandem"
    root: str
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    """All models."""

    object: Literal["list"] = "list"
    data: list[ModelBody]


class HealthBody(msgspec.Struct, kw_only=True):
    """Readiness of each scheduler, by its address."""

    status: Literal["ok", "unavailable"]
    schedulers: dict[str, bool]
