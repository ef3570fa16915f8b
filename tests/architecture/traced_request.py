"""
Serve one request with both services under the tracer, and print the files that it passed.

Started in the root of a tree with that tree's packages on PYTHONPATH; prints one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ACCEPTING, DECODING, OVER = 1, 2, 255
FIRST_TOKEN, LAST_TOKEN = 8, 24
PATIENCE_S = 60
NUM_PROCESSES = 3
SETTLE_S = 0.5


@contextlib.contextmanager
def service(module: str, folder: Path, *arguments: str) -> Iterator[dict[str, str]]:
    """Run a service with the tracer during the block; yield what its ready file says."""
    ready = folder / f"{module}.ready"
    path = f"{folder / 'hook'}{os.pathsep}{os.environ['PYTHONPATH']}"
    env = os.environ | {"PYTHONPATH": path, "TRACE_FOLDER": str(folder), "TRACE_ROLE": module}
    command = [sys.executable, "-m", module, *arguments, f"--ready-file={ready}"]
    with (folder / f"{module}.log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        wait_until(lambda: ready.exists() or process.poll() is not None)
        yield json.loads(ready.read_text())
    except BaseException:
        sys.stderr.write((folder / f"{module}.log").read_text()[-3000:])
        raise
    finally:
        process.terminate()
        process.wait(30)


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait until a condition holds; the tree that is traced may be too old for `tests.waiting`."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if is_so():
            return
        time.sleep(0.1)
    raise TimeoutError


def open_window(window: Path, number: int) -> None:
    """Write in place, as the services have the byte in their memory."""
    with window.open("r+b") as file:
        file.write(bytes([number]))


def records_of(folder: Path) -> list[dict]:
    """Wait until the scheduler, its frontend and the executor have each written a record."""
    wait_until(lambda: len([*folder.glob("*.json")]) >= NUM_PROCESSES)
    return [json.loads(path.read_text()) for path in folder.glob("*.json")]


def ask(address: str, window: Path) -> None:
    """Send a request to warm up, then one whose acceptance and decode steps are recorded."""
    from tandem_client import Client, is_serving  # noqa: PLC0415  # of the tree that is traced

    wait_until(lambda: is_serving(address, "tandem.ready", timeout_s=10))
    with Client(address) as client:
        client.complete("def first(", max_tokens=4, ignore_eos=True)
        # The first request's slot is released after its client has its last token, and nothing tells
        # a client when: what still runs for it would be counted for the second.
        time.sleep(SETTLE_S)
        open_window(window, ACCEPTING)
        stream = client.generate("class Second:", max_tokens=200, ignore_eos=True)
        for number, _ in enumerate(stream):
            if number == FIRST_TOKEN:
                open_window(window, DECODING)
            elif number == LAST_TOKEN:
                break
        open_window(window, OVER)


def summary(records: list[dict], root: Path) -> dict[str, list[str]]:
    """
    Return the files of the scheduler that were entered before the request's first step was planned,
    and those of all processes that were entered while it decoded.
    """
    planned = min(record["planned"]["1"] for record in records if "1" in record["planned"])
    found: dict[str, set[str]] = {"accepted": set(), "decoded": set()}
    for record in records:
        for number, name, at in record["files"]:
            path = Path(name)
            if not path.is_relative_to(root):
                continue
            if number == DECODING:
                found["decoded"].add(str(path.relative_to(root)))
            elif at < planned and record["role"] == "scheduler_svc":
                found["accepted"].add(str(path.relative_to(root)))
    return {what: sorted(names) for what, names in found.items()}


def main() -> None:
    root = Path.cwd().resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        window = folder / "window"
        window.write_bytes(b"\0")
        (folder / "hook").mkdir()
        tracer = Path(__file__).with_name("tracer.py")
        shutil.copy(tracer, folder / "hook/sitecustomize.py")
        model = f"--model={root / 'deploy/models/tandem-py'}"
        options = [model, "--listen=127.0.0.1:0", "--dtype=float32", "--num-threads=1"]
        with service("executor_svc", folder, *options) as executor:
            others = [f"--{kind}-listen=127.0.0.1:0" for kind in ("admin", "metrics")]
            to = f"--executor={executor['address']}"
            with service("scheduler_svc", folder, "--listen=127.0.0.1:0", to, *others) as scheduler:
                ask(scheduler["address"], window)
                records = records_of(folder)
        sys.stdout.write(json.dumps(summary(records, root)) + "\n")


if __name__ == "__main__":
    main()
