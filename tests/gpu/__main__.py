"""`tests/gpu/run`: correctness and rates on a GPU, within a budget of time."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tandem.printing_commands import end_by_signals
from tests.gpu.parts import ROOT, Outcome, run_part
from tests.gpu.plan import BUDGET_S, parts_on_cpu, parts_on_gpu
from tests.gpu.results import aims, write_results

NEEDED = (
    *("torch", "numpy", "structlog", "pydantic", "safetensors"),
    *("pytest", "pytest_asyncio", "pytest_timeout", "hypothesis"),
    *("google.protobuf", "grpc", "grpc_health", "grpc_status", "zmq", "msgspec", "tokenizers"),
    *("jinja2", "prometheus_client", "uvloop", "typer", "rich", "psutil", "transformers"),
)
"""Modules without which a part or another cannot run."""
EXIT_NO_DEVICE = 3


def main(argv: Sequence[str]) -> int:
    """Run what is asked for; 0 if all parts passed, 1 if not, 3 if there is no GPU."""
    given = _options(argv)
    make_parts = parts_on_cpu if given.device == "cpu" else parts_on_gpu
    names = [part.name for part in make_parts(Path())]
    if unknown := set(given.part) - set(names):
        _say(f"there is no part {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
        return 2
    if given.device == "cuda" and not _has_gpu():
        _say(
            "no CUDA device was found, so nothing was run: `--device cpu --tiny` tries the script "
            "itself on the CPU"
        )
        return EXIT_NO_DEVICE
    missing = [
        name for name in (*NEEDED, *["triton"] * (given.device == "cuda")) if not _is_there(name)
    ]
    if missing:
        _say(f"modules are missing, parts that need them will fail: {', '.join(missing)}")
    started_s = time.monotonic()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="gpu-run-") as folder:
        chosen = [
            part for part in make_parts(Path(folder)) if not given.part or part.name in given.part
        ]
        environment = _environment(given.device)
        warming = _warm_peers(given.device, environment)
        try:
            for part in chosen:
                left_s = given.budget_s - (time.monotonic() - started_s)
                outcomes.append(run_part(part, left_s, environment))
                _tell(outcomes[-1])
        finally:
            if warming is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(warming.pid, signal.SIGKILL)  # its compilers too
                warming.wait()
    about = {**_about(given.device), "seconds": round(time.monotonic() - started_s, 1)}
    results = given.results or Path(tempfile.mkdtemp(prefix="gpu-run-results-"))
    page = write_results(results, about, outcomes, judges=not given.tiny)
    for aim in [] if given.tiny else aims({each.name: each.rows for each in outcomes}):
        _say(f"{aim.verdict:>12}: {aim.text} ({'-' if aim.found is None else f'{aim.found:.4g}'})")
    _say(f"written to {page}")
    return 0 if all(outcome.status == "passed" for outcome in outcomes) else 1


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu/run", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="next to no work; always with cpu")
    parser.add_argument("--part", action="append", default=[], help="only this one; repeatable")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="of the whole run")
    parser.add_argument(
        "--results", type=Path, help="folder to write to; with cpu a temporary one by default"
    )
    given = parser.parse_args(argv)
    if given.results is None and given.device == "cuda":
        given.results = Path(__file__).parent / "results"
    if given.tiny != (given.device == "cpu"):
        parser.error("--tiny and --device cpu go together: a GPU's sizes take a CPU hours")
    return given


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False


def _has_gpu() -> bool:
    import torch  # noqa: PLC0415 -- takes seconds, and --help needs it not

    return torch.cuda.is_available()


def _environment(device: str) -> dict[str, str]:
    made = dict(os.environ)
    if device == "cpu":
        return made | {"OMP_NUM_THREADS": "1"}
    toolkit = Path("/usr/local/cuda")
    if "CUDA_HOME" not in made and toolkit.is_dir():
        made["CUDA_HOME"] = str(toolkit)
    return made | {"FLASHINFER_CUDA_ARCH_LIST": "9.0a"}


def _warm_peers(device: str, environment: dict[str, str]) -> subprocess.Popen[bytes] | None:
    """FlashInfer compiles for minutes; meanwhile tests run."""
    if device == "cpu" or find_spec("flashinfer") is None:
        return None
    command = [sys.executable, "-m", "tests.gpu.flashinfer_warm"]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _about(device: str) -> dict[str, Any]:
    import torch  # noqa: PLC0415 -- takes seconds

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    about: dict[str, Any] = {"commit": commit or "unknown", "torch": torch.__version__}
    if device == "cpu":
        return {"device": f"CPU {platform.machine()}, tiny sizes: no rate means anything", **about}
    clocks = subprocess.run(
        ["nvidia-smi", "--query-gpu=clocks.max.sm,clocks.sm,clocks.mem", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "device": torch.cuda.get_device_name(0),
        "clocks (most, now, memory)": clocks or "unknown",
        "CUDA": torch.version.cuda,
        **about,
    }


def _tell(outcome: Outcome) -> None:
    _say(f"{outcome.name}: {outcome.status} in {outcome.seconds:.1f} s")
    if outcome.status != "passed":
        _say("  " + outcome.detail.replace("\n", "\n  "))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    end_by_signals()  # so that the process of a part, in a session of its own, is ended too
    sys.exit(main(sys.argv[1:]))
