"""Argument and answer of a `Query` for what happened lately; see `ipc.snapshot` for the others."""

from __future__ import annotations

import msgspec

from scheduler_svc.ipc.snapshot import HistogramSnapshot

MAX_STEPS = 256
"""Newest steps that the core keeps, and that may be asked for."""


class StepSample(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One step whose result was applied; the fields of `tandem.admin.v1.StepSample`."""

    number: int
    executor: str
    at_s: float
    total_s: float
    compute_s: float
    tokens: int
    requests: int
    is_graph: bool


class FaultEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `tandem.admin.v1.Fault`; `kind` is its number."""

    kind: int
    at_s: float
    where: str = ""
    reason: str = ""
    message: str = ""
    count: int = 1


class ActivityArgument(msgspec.Struct, frozen=True):
    """Most steps to return."""

    max_steps: int


class ActivitySnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """
    Histograms, steps and faults, with times in seconds since the start. `histograms` has the keys
    of those of `MetricsSnapshot`; steps and faults are the newest ones, oldest first.
    """

    uptime_s: float
    histograms: dict[str, HistogramSnapshot]
    steps: tuple[StepSample, ...]
    faults: tuple[FaultEntry, ...]


decode_activity_argument = msgspec.json.Decoder(ActivityArgument).decode
decode_activity = msgspec.json.Decoder(ActivitySnapshot).decode
