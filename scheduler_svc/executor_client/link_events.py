"""Events that the thread that talks to executors reports to the core."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scheduler_svc.executor_client.description import ExecutorDescription
from tandem.errors import TandemError
from tandem.link.results import StepFailed, StepResult
from tandem.link.session import Attached, Heartbeat

FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened:
    """An executor granted a session; no stream is attached yet."""

    description: ExecutorDescription
    tokenizer_dir: Path
    session_epoch: int
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFound:
    """
    The newest session's executor, still of this boot, answers at another address; later streams are
    opened there.
    """

    boot_id: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectFailed:
    """
    An attempt to open a session at one address failed; the link goes on trying.

    `retry_in_s` is the wait before any address is tried again, 0 if the next address follows at
    once. `description` describes the executor, if it answered but cannot be used.
    """

    error: TandemError
    retry_in_s: float
    address: str = ""
    description: ExecutorDescription | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamMessage:
    """One message from the executor on a step stream."""

    stream: int
    message: Attached | StepResult | StepFailed | Heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBroken:
    """A step stream ended; no more messages come from it."""

    stream: int
    error: TandemError


LinkEvent = SessionOpened | PathFound | ConnectFailed | StreamMessage | StreamBroken


def backoff_s(num_failures: int) -> float:
    """Return the seconds to wait after this many failures in a row; 0 after no failure."""
    if num_failures == 0:
        return 0.0
    return float(min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(num_failures - 1, 16)))
