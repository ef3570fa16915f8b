"""Target of faults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.faults.processes.rig import Rig
from tests.faults.readiness import ReadinessWatch
from tests.faults.workload.streams import Streams


@dataclass(frozen=True, slots=True)
class Target:
    """
    The target of faults.

    Attributes:
        rig: The services.
        streams: Their load.
        readiness: Readiness that the scheduler reports.
        other_weights: A model of the same shape with other weights.
    """

    rig: Rig
    streams: Streams
    readiness: ReadinessWatch
    other_weights: Path | None = None
