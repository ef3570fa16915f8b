"""
Run tests as other processors would compute them: one setting of a library changed at a time.

    python -m tests.processors.run                                    # all settings; takes hours
    python -m tests.processors.run --settings 'ATEN*' threads=2 -- -m "not slow" -n 2 tests/kernels
    python -m tests.processors.run --list

Each setting is a process of its own; arguments after `--` go to pytest. `results.json` and
`results.md` in the folder given by --out are written anew after each, and a run with the same
commit, versions and arguments adds to what is there. A setting that was not run says so.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.bench.machine import machine

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/kernels", "tests/executor_svc", "tests/truth")
PACKAGES = ("torch", "triton", "numpy")
RESULTS = Path(__file__).resolve().parent / "results"
LIMIT_S = 3600
"""Seconds for one setting."""

BY_VARIABLE = {
    "OPENBLAS_CORETYPE": ("Haswell", "SkylakeX"),
    "ATEN_CPU_CAPABILITY": ("default", "avx2", "avx512"),
    "ONEDNN_MAX_CPU_ISA": ("AVX2", "AVX512_CORE"),
    "MKL_ENABLE_INSTRUCTIONS": ("AVX2", "AVX512"),
}
"""
Kernels that a library may take, by variable. A processor that lacks them is given what it has.
"""

SETTINGS: dict[str, dict[str, str]] = {
    "unset": {},
    **{
        f"{name}={value}": {name: value} for name, values in BY_VARIABLE.items() for value in values
    },
    "threads=1": {"OMP_NUM_THREADS": "1"},
    "threads=2": {"OMP_NUM_THREADS": "2"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Report of pytest under one setting: exit code (None: out of time), counts and failures."""

    setting: str
    exit_code: int | None
    summary: str
    seconds: float
    failed: tuple[str, ...]


def environment(setting: str, outer: Mapping[str, str]) -> dict[str, str]:
    """
    Return the environment of a setting: of all the variables that a setting names, none but its
    own.
    """
    named = {"OMP_NUM_THREADS", *BY_VARIABLE}
    kept = {name: value for name, value in outer.items() if name not in named}
    return {**kept, **SETTINGS[setting]}


def run(setting: str, arguments: Sequence[str]) -> Outcome:
    """Run pytest under a setting."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", *arguments]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment(setting, os.environ),
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        exit_code, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        exit_code, said = None, (late.stdout or b"").decode()
    return outcome(setting, exit_code, said, time.monotonic() - began)


def outcome(setting: str, exit_code: int | None, said: str, seconds: float) -> Outcome:
    """Read pytest's output and return its outcome."""
    failed = tuple(re.findall(r"^(?:FAILED|ERROR) (\S+)", said, flags=re.MULTILINE))
    counts = re.findall(
        r"^=*\s*(\d+ (?:passed|failed|error|skipped|deselected).*?) in ", said, re.MULTILINE
    )
    ended = "out of time" if exit_code is None else "no summary"
    return Outcome(
        setting=setting,
        exit_code=exit_code,
        summary=counts[-1] if counts and exit_code is not None else ended,
        seconds=round(seconds, 1),
        failed=failed,
    )


def conditions(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the conditions under which results can be compared."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "machine": machine(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "commit": git.stdout.strip(),
        "command": ["pytest", *arguments],
    }


def table(under: Mapping[str, Any], outcomes: Mapping[str, Outcome]) -> str:
    """Return the results as a page."""
    lines = [
        "# The tests under other processors' settings",
        "",
        "Written by `python -m tests.processors.run`. "
        + ", ".join(f"{name} {under[name]}" for name in ("machine", "python", *PACKAGES, "commit")),
        "",
        f"Each line: `{' '.join(under['command'])}`",
        "",
        "| setting | exit code | result | seconds |",
        "|---|---:|---|---:|",
    ]
    for setting in SETTINGS:
        one = outcomes.get(setting)
        if one is None:
            lines.append(f"| `{setting}` | | NOT RUN | |")
        else:
            lines.append(f"| `{setting}` | {one.exit_code} | {one.summary} | {one.seconds:.0f} |")
    failures = [(one.setting, test) for one in outcomes.values() for test in one.failed]
    if failures:
        lines += ["", "Failed:", ""]
        lines += [f"- `{setting}`: `{test}`" for setting, test in failures]
    return "\n".join(lines) + "\n"


def chosen(patterns: Sequence[str]) -> list[str]:
    """
    Return the settings that match.

    Raises:
        SystemExit: A pattern matches none.
    """
    for pattern in patterns:
        if not fnmatch.filter(SETTINGS, pattern):
            raise SystemExit(f"no setting matches {pattern!r}; they are {', '.join(SETTINGS)}")
    return [name for name in SETTINGS if any(fnmatch.fnmatch(name, each) for each in patterns)]


def kept_outcomes(path: Path, under: Mapping[str, Any]) -> dict[str, Outcome]:
    """Return the outcomes that an earlier run left under the same conditions."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["conditions"] != under:
        return {}
    return {
        one["setting"]: Outcome(**{**one, "failed": tuple(one["failed"])})
        for one in found["outcomes"]
    }


def main(arguments: list[str]) -> int:
    """Run the settings asked for; 1 where a test failed under one."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    own, rest = arguments[:at], list(arguments[at + 1 :])
    parser = argparse.ArgumentParser(prog="python -m tests.processors.run", description=__doc__)
    parser.add_argument("--settings", nargs="+", default=["*"], help="names or patterns of names")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of results")
    given = parser.parse_args(own)
    if given.list:
        print("\n".join(SETTINGS))
        return 0
    to_pytest = rest or ["-m", "not gpu", *TESTS]
    under = conditions(to_pytest)
    given.out.mkdir(parents=True, exist_ok=True)
    outcomes = kept_outcomes(given.out / "results.json", under)
    for setting in chosen(given.settings):
        one = outcomes[setting] = run(setting, to_pytest)
        print(f"{one.setting}: exit code {one.exit_code}, {one.summary}", flush=True)
        found = {"conditions": under, "outcomes": [asdict(each) for each in outcomes.values()]}
        (given.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
        (given.out / "results.md").write_text(table(under, outcomes))
    return 0 if all(one.exit_code == 0 for one in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
