"""The table of clients/conformance/RESULTS.md: how each program did in each scenario."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from platform import python_version

from tests.clients.conformance.cases import ANSWERS, FOLDER, STREAMS
from tests.clients.conformance.player import Player
from tests.clients.conformance.programs import BUILD, PROGRAMS
from tests.clients.conformance.scenarios import SCENARIOS

RESULTS = FOLDER / "RESULTS.md"
PASSED, FAILED, NOT_RUN, NOT_HAD = "yes", "**no**", "NOT RUN", "no call"
WITHOUT = {one["name"]: one["without"] for one in SCENARIOS if "without" in one}
"""Programs of clients that do not have what a scenario is about, by scenario."""
SCRIPTED = {
    "every-error": "Each reason of an error, and one that no client knows, is told with its details.",
    "delta-over-4-mib": "A message of a stream over 4 MiB arrives.",
    "answer-over-4-mib": "A whole answer over 4 MiB arrives.",
    "connection-without-an-answer": "A connection is taken and nothing answers: the call fails in time.",
    "cancel-between-attempts": "A caller leaves while its client waits to try again.",
}
"""Scenarios of test_scripted.py, with what they show."""

Results = dict[tuple[str, str], bool]
"""By program and scenario: True if all tests of the scenario passed."""

_HEAD = """# Results
What each client did in each scenario of this folder; `python -m tests.clients.conformance` plays all of them and writes
this page. `yes`: the calls that a server got and the result that the caller got are as promised. `no call`: the client has
none (Python's `generate_many` yields whole completions, and whoever leaves it cancels all).
"""


class Record:
    """A file of JSON lines that several workers of pytest may append to; without a path, nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @contextmanager
    def of(self, player: Player, scenario: str) -> Iterator[None]:
        """Note how a program did: it passed if the block ends without a failure."""
        passed = False
        try:
            yield
            passed = True
        finally:
            self.note(player.program.name, scenario, passed=passed)

    def note(self, program: str, scenario: str, *, passed: bool) -> None:
        """Note how a program did in a scenario."""
        if self._path is None:
            return
        line = json.dumps({"program": program, "scenario": scenario, "passed": passed})
        with self._path.open("a") as file:  # one write of a short line is whole
            file.write(line + "\n")


def read_results(file: Path) -> Results:
    """Read what a run of the tests noted."""
    results: Results = {}
    for line in map(json.loads, file.read_text().splitlines()):
        key = (line["program"], line["scenario"])
        results[key] = line["passed"] and results.get(key, True)
    return results


def scenarios() -> dict[str, dict[str, str]]:
    """Return all scenarios with what they show, by the heading of their table."""
    return {
        "Real services": {one["name"]: one["says"] for one in SCENARIOS},
        "Scripted answers": SCRIPTED,
        "Scripted streams": {one["name"]: one["says"] for one in STREAMS},
        "Scripted whole answers": {one["name"]: one["says"] for one in ANSWERS},
    }


def table_of(results: Results, used: dict[str, str]) -> str:
    """Return the page."""
    names = [one.name for one in PROGRAMS]
    parts = [_HEAD]
    for heading, shown in scenarios().items():
        rows = [
            [f"`{name}`", *(_told(results, program, name) for program in names), says]
            for name, says in shown.items()
        ]
        columns = ["scenario", *names, "what it shows"]
        parts.append(f"## {heading}\n{_markdown(columns, rows)}")
    rows = [[name, used[name]] for name in names]
    parts.append(f"## Versions\n{_markdown(['client', 'tested with'], rows)}")
    return "\n".join(parts)


def versions() -> dict[str, str]:
    """Return the compilers and packages that each program was tested with."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("grpcio", "protobuf"))
    ours = f"Python {python_version()}, {packages}"
    return {one.name: ours if one.language is None else _asked(one.language) for one in PROGRAMS}


def _asked(language: str) -> str:
    command = [str(BUILD), "versions", language]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else NOT_RUN


def _told(results: Results, program: str, scenario: str) -> str:
    if program in WITHOUT.get(scenario, []):
        return NOT_HAD
    passed = results.get((program, scenario))
    if passed is None:
        return NOT_RUN
    return PASSED if passed else FAILED


def _markdown(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
