"""Results of long runs: JSON that each run adds to, and a page made of it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from tests.e2e.cluster import ROOT
from tests.faults.schedule import Kind

_INTRODUCTION = """# Long runs

Made by `tests/soak/run`. Each storm is one kind of fault, again and again, under 64 streams (greedy and seeded, penalised,
with stop strings, some with two choices): link faults every second, all others at least a second after tokens flow again.
Every line stands for a run in which no stream failed, no offset was lost, repeated or out of order, all tokens were those of the
run without a fault, all blocks came back, and no thread, file descriptor or process was left over; a run in which one of these
did not hold says so instead. *Streams affected* were silent for more than half a second, in the mean of all times.
"""


class Results:
    """One folder with `results.json` and `results.md`."""

    def __init__(self, folder: Path, model: str, seed: int) -> None:
        self._folder = folder
        self._about = {
            "model": model,
            "seed": seed,
            "commit": _commit(),
            "cores": os.cpu_count(),
            "cpu": _cpu(),
            "python": platform.python_version(),
        }
        file = folder / "results.json"
        self._all: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def add_storm(self, kind: Kind, seconds: float, line: dict[str, Any]) -> None:
        """Replace what was known of a kind."""
        storms = self._all.setdefault("storms", {})
        storms[str(kind)] = {**line, "seconds": seconds, **self._about}
        self._write()

    def add_saturated(self, found: dict[str, Any]) -> None:
        """Replace what was known of saturation."""
        self._all["saturated"] = {**found, **self._about}
        self._write()

    def _write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self._all, indent=1, sort_keys=True) + "\n"
        (self._folder / "results.json").write_text(text)
        (self._folder / "results.md").write_text(self._page())

    def _page(self) -> str:
        rows = [
            "| fault | seconds | times | streams affected | longest pause | recomputed tokens | commit |",
            "|---|---|---|---|---|---|---|",
        ]
        storms = self._all.get("storms", {})
        rows += [_row(str(kind), storms[str(kind)]) for kind in Kind if str(kind) in storms]
        page = [_INTRODUCTION, "## Storms", "", *rows, ""]
        saturated = self._all.get("saturated")
        if saturated is not None:
            page += ["## Saturated, without a fault", ""]
            page += [f"- {name}: {saturated[name]}" for name in sorted(saturated)]
            page += [""]
        return "\n".join(page)


def _row(kind: str, line: dict[str, Any]) -> str:
    if "failed" in line:
        return f"| {kind} | {line['seconds']:g} | FAILED: {line['failed'][:200]} | | | | {line['commit']} |"
    recomputed = line["recomputed_tokens"]
    return (
        f"| {kind} | {line['seconds']:g} | {line['times']} | {line['affected_streams']:g} "
        f"| {line['longest_pause_s']:.2f} s | {'?' if recomputed is None else recomputed} "
        f"| {line['commit']} |"
    )


def _commit() -> str:
    command = ["git", "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
