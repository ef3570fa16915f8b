"""`tests/gpu/run`: correctness and rates on a GPU, within a budget of time."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tandem.process.printing_commands import end_by_signals
from tests.gpu.aims import aims
from tests.gpu.parts import (
    EXIT_NO_DEVICE,
    ROOT,
    Child,
    Outcome,
    Part,
    Tell,
    nothing_read,
    run_parts,
)
from tests.gpu.plan import BUDGET_S, STAGES, Group, groups_on_cpu, groups_on_gpu
from tests.gpu.results import Results, UnfitResults, earlier_outcomes, merged, write_results

NEEDED = (
    *("torch", "numpy", "structlog", "pydantic", "safetensors"),
    *("pytest", "pytest_asyncio", "pytest_timeout", "hypothesis"),
    *("google.protobuf", "grpc", "grpc_health", "grpc_reflection", "grpc_status", "zmq"),
    *("msgspec", "tokenizers", "annotated_types"),
    *("jinja2", "prometheus_client", "uvloop", "typer", "rich", "psutil", "transformers"),
)
"""Modules that all parts or some need."""
_GENERATED = "tandem.executor.v1.executor_service_pb2_grpc"
"""Code that refuses to be imported where protobuf or gRPC is older than what made it."""
WEIGHTS_S, FLASHINFER_S = 80.0, 165.0
"""Longest times to draw weights, and for FlashInfer to compile."""
_POLL_S = 0.1
_FIRST_OWN_MAJOR = 9
"""First architecture with instructions that later ones lack, which the suffix asks for."""
_VERSIONS = ("triton", "transformers", "flashinfer-python", "numpy", "grpcio", "protobuf")
"""Distributions whose versions are told beside PyTorch's."""
EXIT_WRONG_USAGE = 2


def main(argv: Sequence[str]) -> int:
    """
    Run what is asked for; 0 if all parts passed, 1 if not, 2 if there is no such part or the folder
    has other results, 3 if there is no GPU.
    """
    given = _options(argv)
    make_groups = groups_on_cpu if given.device == "cpu" else groups_on_gpu
    names = [part.name for group in _chosen(make_groups(Path()), given) for part in group.parts]
    if unknown := [asked for asked in given.part if not _named(names, [asked])]:
        _say(f"there is no part {', '.join(unknown)}; there are: {', '.join(names)}")
        return EXIT_WRONG_USAGE
    if given.device == "cuda" and not _has_gpu():
        _say(
            "no CUDA device was found, so nothing was run: `--device cpu --tiny` tries the script "
            "itself on the CPU"
        )
        return EXIT_NO_DEVICE
    missing = _missing(with_triton=given.device == "cuda")
    if missing:
        _say(f"parts that need them will fail, modules are missing: {', '.join(missing)}")
    folder = given.results or Path(tempfile.mkdtemp(prefix="gpu-run-results-"))
    try:
        report = _Report(folder, {**_about(given), "missing": missing}, is_tiny=given.tiny)
    except UnfitResults as error:
        _say(str(error))
        return EXIT_WRONG_USAGE
    with tempfile.TemporaryDirectory(prefix="gpu-run-") as models:
        _run_groups(given, _chosen(make_groups(Path(models)), given), Path(models), report)
    for aim in [] if given.tiny else aims(report.outcomes):
        found = "-" if aim.found is None else f"{aim.found:.4g}"
        _say(f"{aim.verdict:>12}: {aim.text} ({'; '.join(filter(None, (found, aim.basis)))})")
    _say(f"written to {folder}")
    return 0 if all(outcome.status == "passed" for outcome in report.own) else 1


def _run_groups(
    given: argparse.Namespace, groups: Sequence[Group], models: Path, report: _Report
) -> None:
    ends_s = time.monotonic() + given.budget_s
    environment = _environment(given.device)
    chosen = [
        replace(group, parts=[part for part in group.parts if _named([part.name], given.part)])
        for group in groups
    ]
    preparing = [] if given.device == "cpu" else _preparing(chosen, models)
    with _preparations(preparing, environment, report.add) as finish:
        for group in chosen:
            if group.is_timed and group.parts:
                finish(ends_s)
            run_parts(
                group.parts,
                left_s=min(group.limit_s, ends_s - time.monotonic()),
                environment=environment,
                tell=report.add,
                at_once=group.at_once,
            )


def _chosen(groups: Sequence[Group], given: argparse.Namespace) -> list[Group]:
    """Return the groups of the stages that are asked for; all if none is."""
    return [group for group in groups if not given.stage or group.stage in given.stage]


def _named(names: Sequence[str], asked: Sequence[str]) -> list[str]:
    """Return the names that begin with one of those asked for; all if none is asked for."""
    return [name for name in names if not asked or name.startswith(tuple(asked))]


class _Report:
    """
    Report of all outcomes so far, written after each one: the run may be ended at any time.

    Attributes:
        own: Outcomes of this command.
        outcomes: Outcomes of earlier commands too, each part's latest.
    """

    def __init__(self, folder: Path, about: dict[str, Any], *, is_tiny: bool) -> None:
        """
        Raises:
            UnfitResults: Results are in the folder to which none can be added.
        """
        self.own: list[Outcome] = []
        self.outcomes = earlier_outcomes(folder, is_tiny=is_tiny)
        self._folder = folder
        self._about = about
        self._is_tiny = is_tiny
        self._started_s = time.monotonic()

    def add(self, outcome: Outcome) -> None:
        """Tell and write one more."""
        made = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": str(self._about["commit"]),
            "device": str(self._about["device"]),
        }
        outcome = replace(outcome, made=made)
        self.own.append(outcome)
        self.outcomes = merged(self.outcomes, [outcome])
        _say(f"{outcome.name}: {outcome.status} in {outcome.seconds:.1f} s")
        if outcome.status != "passed":
            _say("  " + outcome.detail.replace("\n", "\n  "))
        about = {**self._about, "seconds": round(time.monotonic() - self._started_s, 1)}
        results = Results(about=about, is_tiny=self._is_tiny, outcomes=self.outcomes)
        write_results(self._folder, results)


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu/run", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="next to no work; always with cpu")
    parser.add_argument(
        "--part", action="append", default=[], help="only those so called, or whose names begin so"
    )
    parser.add_argument(
        "--stage", action="append", default=[], choices=STAGES, help="only the parts of this stage"
    )
    parser.add_argument(
        "--commit", help="what is run, where that cannot be asked of git; default: its answer"
    )
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="of the whole run")
    parser.add_argument(
        "--results",
        type=Path,
        help="folder to write to, or to add to; with cpu a temporary one by default",
    )
    given = parser.parse_args(argv)
    if given.results is None and given.device == "cuda":
        given.results = Path(__file__).parent / "results"
    if given.tiny != (given.device == "cpu"):
        parser.error("--tiny and --device cpu go together: a GPU's sizes take a CPU hours")
    return given


def _missing(*, with_triton: bool) -> list[str]:
    """Return the modules that are missing, and those that are too old."""
    missing = [name for name in (*NEEDED, *["triton"] * with_triton) if not _is_there(name)]
    try:
        importlib.import_module(_GENERATED)
    except (ImportError, RuntimeError) as error:
        missing.append(f"{_GENERATED} ({str(error).partition(chr(10))[0]})")
    return missing


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False


def _has_gpu() -> bool:
    import torch  # noqa: PLC0415  # takes seconds, and --help needs it not

    return torch.cuda.is_available()


def _environment(device: str) -> dict[str, str]:
    # A process that is killed has then said all it could, and one that crashes says where.
    made = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    if device == "cpu":
        return made | {"OMP_NUM_THREADS": "1"}
    toolkit = Path("/usr/local/cuda")
    if "CUDA_HOME" not in made and toolkit.is_dir():
        made["CUDA_HOME"] = str(toolkit)
    return made | {"FLASHINFER_CUDA_ARCH_LIST": _architecture()}


def _architecture() -> str:
    """Return the device's architecture as FlashInfer compiles for it: from 9.0 on its own alone."""
    import torch  # noqa: PLC0415  # takes seconds

    major, minor = torch.cuda.get_device_capability(0)
    return f"{major}.{minor}{'a' if major >= _FIRST_OWN_MAJOR else ''}"


def _preparing(groups: Sequence[Group], models: Path) -> list[Part]:
    """
    Return what benchmarks among the parts would wait for while their time runs. Limits are those
    for which a stage has room beside what it does meanwhile.
    """
    parts = [part for group in groups for part in group.parts]
    found = []
    if any("--models" in part.arguments for part in parts):
        write = ("-m", "tests.gpu.rates.offline", "--models", str(models), "--only-write")
        found.append(Part(name="weights", arguments=write, limit_s=WEIGHTS_S, read=nothing_read))
    if any("attention" in part.name.split() for part in parts) and _is_there("flashinfer"):
        warm = ("-m", "tests.gpu.rates.flashinfer_warm")
        found.append(
            Part(name="flashinfer", arguments=warm, limit_s=FLASHINFER_S, read=nothing_read)
        )
    return found


@contextlib.contextmanager
def _preparations(
    parts: Sequence[Part], environment: dict[str, str], tell: Tell
) -> Iterator[Callable[[float], None]]:
    """
    Prepare meanwhile: weights are drawn, and FlashInfer compiles for minutes. What is yielded waits
    for all of it until a time and ends the rest, so that nothing runs beside what is timed.
    """
    children = [Child(part, part.limit_s, environment) for part in parts]

    def finish(ends_s: float) -> None:
        while not all(child.is_over() for child in children) and time.monotonic() < ends_s:
            time.sleep(_POLL_S)
        while children:
            child = children.pop()
            if not child.is_over():
                child.ask()
            child.end()
            tell(child.outcome())

    try:
        yield finish
    finally:
        finish(time.monotonic())


def _about(given: argparse.Namespace) -> dict[str, Any]:
    import torch  # noqa: PLC0415  # takes seconds

    about: dict[str, Any] = {
        "commit": given.commit or _answer("git", "describe", "--always", "--dirty"),
        "processor": f"{_processor()}, {os.cpu_count()} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _version(name) for name in _VERSIONS},
    }
    if given.device == "cpu":
        return {"device": f"CPU {platform.machine()}, tiny sizes: no rate means anything", **about}
    clocks = "--query-gpu=clocks.max.sm,clocks.sm,clocks.mem"
    driver = "--query-gpu=driver_version"
    return {
        "device": torch.cuda.get_device_name(0),
        "driver": _answer("nvidia-smi", driver, "--format=csv,noheader"),
        "clocks (most, now, memory)": _answer("nvidia-smi", clocks, "--format=csv,noheader"),
        "CUDA": torch.version.cuda,
        **about,
    }


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"


def _processor() -> str:
    """Return the name of the processor, as Linux has it, else its architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _answer(*command: str) -> str:
    """Return what a program prints, or "unknown" where it is missing, hangs or prints nothing."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    end_by_signals()  # so that the process of a part, in a session of its own, is ended too
    sys.exit(main(sys.argv[1:]))
