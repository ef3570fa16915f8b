"""Commands of the core to the executor: a batch, or a change of what is done with KV memory."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from tandem.link.batch import Batch


class KvMode(enum.Enum):
    """Treatment of the KV memory during a suspension."""

    PERSIST = 1
    OFFLOAD = 2
    RECOMPUTE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspend:
    """Stop computing until `Resume`."""

    kv_mode: KvMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """End a suspension."""


Command: TypeAlias = Batch | Suspend | Resume


@dataclass(slots=True, kw_only=True)  # never changed; frozen would take three times as long to make
class Step:
    """Command with its place in the session; `step_id` counts 1, 2, 3, ... without a gap."""

    session_epoch: int
    step_id: int
    acked_step_id: int
    state_hash: int
    command: Command
