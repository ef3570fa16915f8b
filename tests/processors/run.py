"""
Run tests as other processors would compute them: one setting of a library changed at a time.

    python -m tests.processors.run                                    # all settings; takes hours
    python -m tests.processors.run --settings 'ATEN*' threads=2 -- -m "not slow" -n 2 tests/kernels
    python -m tests.processors.run --list

Each setting is a process of its own; arguments after `--` go to pytest. A short computation goes
before it (probe.py): a setting under which that is an illegal instruction is not run, and one
under which it gives the same bits as without any setting is marked, for it proves little here.

`results.json` and `results.md` in the folder given by --out are written anew after each setting.
They keep one record for each machine, its vector instructions and the arguments: a run with the
same commit and versions adds to the record, another replaces it. A setting that was not run says so.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

from tests.bench.machine import machine

ROOT = Path(__file__).resolve().parents[2]
PROBE = Path(__file__).resolve().parent / "probe.py"
TESTS = ("tests/kernels", "tests/executor_svc", "tests/truth")
PACKAGES = ("torch", "triton", "numpy")
RESULTS = Path(__file__).resolve().parent / "results"
LIMIT_S = 3600
"""Seconds for one setting."""
VECTORS = {
    "amx_bf16": "AVX-512 and AMX",
    "avx512_bf16": "AVX-512 with bfloat16",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "avx": "AVX",
}
"""Names of vector instructions by the processor's flag, widest first."""
NO_INSTRUCTION = "illegal instruction: this processor lacks it"

BY_VARIABLE = {
    "OPENBLAS_CORETYPE": ("Nehalem", "Sandybridge", "Haswell", "SkylakeX"),
    "ATEN_CPU_CAPABILITY": ("default", "avx2", "avx512"),
    "ONEDNN_MAX_CPU_ISA": ("AVX2", "AVX512_CORE"),
    "MKL_ENABLE_INSTRUCTIONS": ("AVX2", "AVX512"),
    "MKL_CBWR": ("COMPATIBLE",),
}
"""
Kernels that a library may take, by variable. On a processor that lacks them oneDNN and MKL take
what it has; OpenBLAS and ATen obey and end in an illegal instruction.
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
    """
    Report of pytest under one setting: exit code (None: it did not end, or was not begun), counts
    and failures, and the digest of what the probe computed.
    """

    setting: str
    exit_code: int | None
    summary: str
    seconds: float
    failed: tuple[str, ...]
    probe: str = ""


Conditions: TypeAlias = dict[str, Any]
Record: TypeAlias = tuple[Conditions, dict[str, Outcome]]
"""Outcomes that pytest reported by setting, and the conditions of the run."""


def environment(setting: str, outer: Mapping[str, str]) -> dict[str, str]:
    """
    Return the environment of a setting: of all the variables that a setting names, none but its
    own.
    """
    named = {"OMP_NUM_THREADS", *BY_VARIABLE}
    kept = {name: value for name, value in outer.items() if name not in named}
    return {**kept, **SETTINGS[setting]}


def probe(setting: str) -> str:
    """
    Return the digest of the same small computations under a setting, with the number of threads
    that tests use unless it names one; "" if the processor lacks an instruction for them.

    Raises:
        CalledProcessError: The probe failed in another way.
    """
    done = subprocess.run(
        [sys.executable, str(PROBE)],
        env={"OMP_NUM_THREADS": "1", **environment(setting, os.environ)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == -signal.SIGILL:
        return ""
    done.check_returncode()
    return done.stdout.strip()


def run(setting: str, arguments: Sequence[str]) -> Outcome:
    """Run pytest under a setting, if the processor has what it asks for."""
    digest = probe(setting)
    if not digest:
        return Outcome(
            setting=setting, exit_code=None, summary=NO_INSTRUCTION, seconds=0, failed=()
        )
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
    return replace(outcome(setting, exit_code, said, time.monotonic() - began), probe=digest)


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


def vectors() -> str:
    """Return the widest vector instructions of this machine's processor."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    return next((name for flag, name in VECTORS.items() if flag in flags), "neither AVX")


def conditions(arguments: Sequence[str]) -> Conditions:
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
        "vectors": vectors(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "commit": git.stdout.strip(),
        "command": ["pytest", *arguments],
    }


def page(records: Sequence[Record]) -> str:
    """Return the records as a page."""
    head = [
        "# The tests under other processors' settings",
        "",
        "Written by `python -m tests.processors.run`. A setting marked = computes the same bits as",
        "`unset` on that machine, as far as a short probe tells: it says little that `unset` does not.",
    ]
    return "\n".join([*head, *(line for one in records for line in ("", *section(one)))]) + "\n"


def section(record: Record) -> list[str]:
    """Return the lines of one record: its conditions, a row per setting, what failed."""
    under, outcomes = record
    facts = ("machine", "vectors", "python", *PACKAGES, "commit")
    lines = [
        f"## {under['vectors']}: `{shlex.join(under['command'])}`",
        "",
        ", ".join(f"{name} {under[name]}" for name in facts),
        "",
        "| setting | exit code | result | seconds |",
        "|---|---:|---|---:|",
    ]
    unset = outcomes["unset"].probe if "unset" in outcomes else ""
    for setting in SETTINGS:
        one = outcomes.get(setting)
        if one is None:
            lines.append(f"| `{setting}` | | NOT RUN | |")
        elif one.summary == NO_INSTRUCTION:
            lines.append(f"| `{setting}` | | NOT RUN: {NO_INSTRUCTION} | |")
        else:
            same = " =" if setting != "unset" and unset and one.probe == unset else ""
            code = "" if one.exit_code is None else one.exit_code
            lines.append(f"| `{setting}`{same} | {code} | {one.summary} | {one.seconds:.0f} |")
    failures = [(one.setting, test) for one in outcomes.values() for test in one.failed]
    if failures:
        lines += ["", "Failed:", ""]
        lines += [f"- `{setting}`: `{test}`" for setting, test in failures]
    return lines


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


def read_records(path: Path) -> list[Record]:
    """Return the records of earlier runs."""
    if not path.exists():
        return []
    return [
        (
            one["conditions"],
            {
                each["setting"]: Outcome(**{**each, "failed": tuple(each["failed"])})
                for each in one["outcomes"]
            },
        )
        for one in json.loads(path.read_text(encoding="utf-8"))
    ]


def write_records(folder: Path, records: Sequence[Record]) -> None:
    """Write both files of results."""
    found = [
        {"conditions": under, "outcomes": [asdict(one) for one in outcomes.values()]}
        for under, outcomes in records
    ]
    (folder / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (folder / "results.md").write_text(page(records), encoding="utf-8")


def record_of(records: list[Record], under: Conditions) -> dict[str, Outcome]:
    """
    Return the outcomes to add to: those under the same conditions, or none yet in the place of the
    record that the same machine had for the same arguments.
    """
    for index, (before, outcomes) in enumerate(records):
        if all(before[name] == under[name] for name in ("machine", "vectors", "command")):
            if before != under:
                records[index] = (under, outcomes := {})
            return outcomes
    records.append((under, {}))
    return records[-1][1]


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
    records = read_records(given.out / "results.json")
    outcomes = record_of(records, under)
    for setting in chosen(given.settings):
        one = outcomes[setting] = run(setting, to_pytest)
        print(f"{one.setting}: exit code {one.exit_code}, {one.summary}", flush=True)
        write_records(given.out, records)
    return int(
        any(one.exit_code != 0 for one in outcomes.values() if one.summary != NO_INSTRUCTION)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
