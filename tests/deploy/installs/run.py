"""
Makes the table of installs: `python -m tests.deploy.installs.run`, which takes long and gigabytes.

For each build of PyTorch and each Python it clones what is committed here into an empty folder, takes
an empty home and an empty environment, and runs both commands of the README as a stranger would.
What it finds goes into results.json and README.md beside it; cells that it is not asked for stay.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
PYTHONS = ("3.11", "3.12", "3.13")
BUILDS = {"cuda": "CUDA, pip's own index", "cpu": "CPU, `TANDEM_TORCH_INDEX`"}
PASSED_ON = re.compile(r"(?i)^(SSL_CERT_FILE|SSL_CERT_DIR|(https?|all|no)_proxy)$")
"""Variables of the environment that a machine needs to reach any network at all."""
SIZE = re.compile(r"Downloading \S+ \((\d+(?:\.\d+)?) (k|M|G)B\)")
HEAD = """\
# Installs

Both commands of the README from an empty home, a clean clone and an empty environment, as written by
`python -m tests.deploy.installs.run` (`--help` tells how to ask for single cells). Seconds include
the download; megabytes are what pip downloaded, and `.venv` afterwards. NOT RUN says why.

| PyTorch | Python | PyTorch, Triton | `demo`: exit, s | `test`: exit, s | MB loaded | MB in `.venv` | when, where |
|---|---|---|---|---|---|---|---|
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the cells asked for, write the table; gives 1 if a command failed in one."""
    parser = argparse.ArgumentParser(description="Makes the table of installs.")
    parser.add_argument("--build", action="append", choices=BUILDS, help="default: all")
    parser.add_argument("--python", action="append", choices=PYTHONS, help="default: all")
    parser.add_argument(
        "--cpu-index", metavar="URL", help="package index with CPU builds of PyTorch"
    )
    parser.add_argument(
        "--test-arguments", default="", metavar="TEXT", help="for deploy/local/test"
    )
    parser.add_argument("--demo-only", action="store_true", help="leave out deploy/local/test")
    parser.add_argument("--folder", type=Path, help="where clones are made (default: TMPDIR)")
    options = parser.parse_args(arguments)
    failed = False
    for build in options.build or BUILDS:
        for version in options.python or PYTHONS:
            cell = fill(build, version, options)
            results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            results[f"{build} {version}"] = cell
            failed |= any(cell.get(name, {}).get("exit") for name in ("demo", "test"))
            RESULTS.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
            (HERE / "README.md").write_text(HEAD + "".join(rows(results)))
            print(build, version, json.dumps(cell), flush=True)
    return int(failed)


def fill(build: str, version: str, options: argparse.Namespace) -> dict[str, object]:
    """Try one build of PyTorch with one Python, and clean up."""
    python = find_python(version)
    if python is None:
        return {"not_run": f"no Python {version} here"}
    if build == "cpu" and not options.cpu_index:
        return {"not_run": "no package index of CPU builds was named (`--cpu-index`)"}
    if build == "cuda" and platform.system() == "Darwin":
        return {"not_run": "PyTorch has no CUDA build for macOS"}
    folder = Path(tempfile.mkdtemp(prefix="tandem-install-", dir=options.folder))
    try:
        return measure(folder, python, build, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(
    folder: Path, python: str, build: str, options: argparse.Namespace
) -> dict[str, object]:
    """Run both commands in a clone of their own."""
    clone, home = folder / "tandem", folder / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    environment = {name: value for name, value in os.environ.items() if PASSED_ON.match(name)}
    environment |= {"HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHON": python}
    if build == "cpu":
        environment["TANDEM_TORCH_INDEX"] = options.cpu_index
    cell: dict[str, object] = {
        "demo": run(clone, ["deploy/local/demo"], environment),
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "machine": machine(),
    }
    loaded = megabytes(clone)
    if not options.demo_only:
        arguments = shlex.split(options.test_arguments)
        cell["test"] = run(clone, ["deploy/local/test", *arguments], environment)
        cell["test_arguments"] = options.test_arguments
        loaded += megabytes(clone)
    sizes = subprocess.run(["du", "-sk", clone / ".venv"], capture_output=True, check=False)
    cell["loaded_mb"] = round(loaded)
    cell["disk_mb"] = int((sizes.stdout.split() or [b"0"])[0]) // 1024
    cell["versions"] = versions(clone)
    return cell


def run(clone: Path, command: Sequence[str], environment: dict[str, str]) -> dict[str, object]:
    """Run a command in a clone to its end; give exit status, seconds and its last line."""
    begin = time.monotonic()
    outcome = subprocess.run(
        command,
        cwd=clone,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    seconds = round(time.monotonic() - begin)
    print(outcome.stdout[-6000:], flush=True)
    last = (outcome.stdout.strip().splitlines() or [""])[-1]
    return {"exit": outcome.returncode, "s": seconds, "last": last}


def megabytes(clone: Path) -> float:
    """Add up what pip downloaded at the last installation."""
    log = clone / ".venv/.tandem-install.log"
    units = {"k": 1e-3, "M": 1.0, "G": 1e3}
    words = log.read_text(errors="replace") if log.exists() else ""
    return sum(float(size) * units[unit] for size, unit in SIZE.findall(words))


def versions(clone: Path) -> str:
    """Name the PyTorch and Triton that were installed."""
    code = (
        "from importlib.metadata import distributions as all\n"
        "had = {one.name: one.version for one in all()}\n"
        "print(had.get('torch', 'none'), had.get('triton', 'none'), sep=', ')"
    )
    outcome = subprocess.run(
        [clone / ".venv/bin/python", "-c", code], capture_output=True, text=True, check=False
    )
    return outcome.stdout.strip()


def find_python(version: str) -> str | None:
    """Find an interpreter on the path or among pyenv's."""
    candidates = [shutil.which(f"python{version}")]
    candidates += sorted(map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python3")))
    for python in candidates:
        if python and not probe(python):
            return python
    return None


def probe(python: str) -> int:
    """Give 0 for an interpreter that runs and can make environments; pyenv's stand-ins do not."""
    command = [python, "-c", "import venv, ensurepip"]
    return subprocess.run(command, capture_output=True, check=False).returncode


def machine() -> str:
    """Name the processor."""
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) or [""]
    return f"{names[0] or platform.processor()}, {os.cpu_count()} CPUs, {platform.system()}"


def rows(results: dict[str, dict[str, object]]) -> list[str]:
    """Write a line of the table for each cell."""
    lines = []
    for build, name in BUILDS.items():
        for version in PYTHONS:
            cell = results.get(f"{build} {version}", {"not_run": "not asked for"})
            if "not_run" in cell:
                lines.append(f"| {name} | {version} | NOT RUN: {cell['not_run']} | | | | | |\n")
                continue
            demo, test = cell["demo"], cell.get("test")
            tested = (
                f"{test['exit']}, {test['s']} (`{cell['test_arguments'] or 'all'}`: {test['last']})"
                if test
                else "NOT RUN: not asked for"
            )
            lines.append(
                f"| {name} | {version} | {cell['versions']} | {demo['exit']}, {demo['s']} | {tested} "
                f"| {cell['loaded_mb']} | {cell['disk_mb']} | {cell['date']}, {cell['machine']}{cell.get('note', '')} |\n"
            )
    return lines


if __name__ == "__main__":
    sys.exit(main())
