"""Logs of services during a storm, and the problems that they must not show."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

EXPECTED_ERRORS = frozenset(
    {
        "frontend_exited",  # a test killed a frontend
        "step_failed",  # a test told a step to raise
    }
)


def events(log: Path) -> Iterable[dict[str, Any]]:
    """Yield the events of a log of JSON lines; a line of another kind becomes `{"raw": line}`."""
    for line in log.read_text(errors="replace").splitlines():
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            event = {"raw": line}
        yield event if isinstance(event, dict) else {"raw": line}


def find_problems(logs: Iterable[Path]) -> list[str]:
    """
    Return tracebacks that no test ordered, integrity failures, hashes that differ, unexpected
    errors.
    """
    problems = []
    for log in logs:
        for event in events(log):
            text = json.dumps(event)
            name = str(event.get("event"))
            is_traceback = "Traceback" in text or "exception" in event
            is_unexpected = event.get("level") in ("error", "critical") and (
                name not in EXPECTED_ERRORS
            )
            if (
                (is_traceback and "InjectedFault" not in text)
                or "integrity" in name
                or "state hash" in text
                or is_unexpected
            ):
                problems.append(f"{log.name}: {text[:2000]}")
    return problems


def count(logs: Iterable[Path], name: str) -> int:
    """Return how often an event of this name was logged."""
    return sum(event.get("event") == name for log in logs for event in events(log))
