"""
Print figures of the code's structure, of this tree or of a commit.

    python -m tests.architecture.figures [--json] [--at REV] [--no-trace]

The last two figures are measured: both services of the tree serve a request under a tracer. What
they do now and then beside it counts too, so that the numbers differ by a few between runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from tests.architecture.counting import Figure, Tree, counted, figure

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("", "protos/python", *(f"clients/{name}" for name in ("python", "embedded", "bench")))
TRACED = {
    "accepted": "files a request passes until a step is planned for it",
    "decoded": "files of a decode step's round trip",
}
TRACE_S = 300
NUM_SHOWN = 5


@contextlib.contextmanager
def checked_out(revision: str | None) -> Iterator[Path]:
    """Yield the folder of this tree, or of a temporary copy of a commit."""
    if revision is None:
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as folder:
        command = ["git", "archive", "--format=tar", revision]
        archive = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
        yield Path(folder).resolve()


def traced(root: Path, *, wanted: bool) -> list[Figure]:
    """Return the figures that are measured with a request, or the reason why they are not."""
    if not wanted:
        return _untraced("--no-trace")
    if not (root / "scheduler_svc/__main__.py").exists():
        return _untraced("no services to start")
    path = os.pathsep.join(str(root / name) for name in PACKAGES)
    program = Path(__file__).with_name("traced_request.py")
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", str(program)]
    try:
        run = subprocess.run(
            command, cwd=root, env=env, capture_output=True, text=True, check=True, timeout=TRACE_S
        )
    except subprocess.CalledProcessError as error:
        return _untraced((error.stderr.strip().splitlines() or [str(error)])[-1])
    except subprocess.TimeoutExpired as error:
        return _untraced(str(error))
    tree, files = Tree(root), json.loads(run.stdout)
    passed = {what: set(files[key]) & set(tree.product) for key, what in TRACED.items()}
    return [
        figure(what, "", len(names), {name: tree.num_lines(name) for name in names})
        for what, names in passed.items()
    ]


def line(one: Figure) -> str:
    """Return a figure as one line: what, value, aim and the largest of its parts."""
    value = "-" if one.value is None else f"{one.value:,}"
    aim = f" [{one.aim}]" if one.aim else ""
    parts = ", ".join(f"{name} {size:,}" for name, size in list(one.parts.items())[:NUM_SHOWN])
    note = parts or one.why
    return f"{one.name}: {value}{aim}" + (f"  ({note})" if note else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print all parts of each figure")
    parser.add_argument("--at", metavar="REV", help="a commit instead of this tree")
    parser.add_argument("--no-trace", action="store_true", help="start no services")
    arguments = parser.parse_args()
    with checked_out(arguments.at) as root:
        figures = [*counted(Tree(root)), *traced(root, wanted=not arguments.no_trace)]
    if arguments.json:
        print(json.dumps([asdict(one) for one in figures], indent=2))
    else:
        print("\n".join(line(one) for one in figures))


def _untraced(why: str) -> list[Figure]:
    return [Figure(name=what, aim="", value=None, parts={}, why=why) for what in TRACED.values()]


if __name__ == "__main__":
    main()
