"""Parts of a run, on a GPU and, all of them tiny, on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.parts import ROOT, Part, count_tests

BUDGET_S = 525.0
"""Seconds for the whole run: under nine minutes with what comes before and after."""

_PYTEST = (
    *("-m", "pytest", "-v", "-p", "no:cacheprovider", "--tb=short", "--color=no"),
    # Only this ends a test that waits for a device which never answers, and says where it waits.
    *("--timeout=80", "--timeout-method=thread"),
)
_BENCH = ("-m", "tandem_bench")
_MODELS = ("llama-8b", "llama-1b", "qwen3-0.6b")
_NOTHING_COLLECTED = 5

WITHOUT_A_DEVICE = (
    "tests/gpu/test_run.py",  # is about this script
    "tests/kernels/triton/test_*compiled.py",  # compile for a device that need not be there
    "tests/kernels/triton/test_whole_model*.py",  # have the interpreter compute on the CPU
)
"""Tests that need no GPU, or that it would hinder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """
    Parts of one kind.

    Attributes:
        parts: Parts in order.
        limit_s: Seconds for all of them.
        at_once: Number that run side by side: more than one where nothing is timed.
    """

    parts: Sequence[Part]
    limit_s: float
    at_once: int = 1


def stages_on_gpu(folder: Path) -> list[Stage]:
    """
    Return the stages: correctness first, as no rate is worth anything without it, then what the
    aims are about, and last, for whatever time is left, the many small cases that the interpreter
    tries elsewhere.

    Parts are small, so that one which crashes or hangs does not stop the others.

    Args:
        folder: Where parts keep models that more than one needs.
    """
    return [
        Stage(parts=_tests("tests/gpu", "gpu", limit_s=110), limit_s=120, at_once=6),
        _benches(folder),
        Stage(
            parts=_tests(
                "tests/kernels/triton",
                "not slow",
                limit_s=150,
                allowed_codes=(0, _NOTHING_COLLECTED),
            ),
            limit_s=170,
            at_once=8,
        ),
    ]


def _benches(folder: Path) -> Stage:
    models = ("--models", str(folder))
    parts = [
        Part(name="roofline", arguments=(*_BENCH, "roofline", "--json"), limit_s=20),
        *(
            Part(
                name=f"{operation} attention",
                arguments=(
                    *(*_BENCH, "kernels", "--full", "--json", "--time-limit", str(limit_s - 15)),
                    *("--model", "llama-8b", "--operation", operation),
                ),
                limit_s=limit_s,
                allowed_codes=(0, 1),
            )
            for operation, limit_s in (("decode", 52), ("prefill", 43))
        ),
        *(
            Part(
                name=f"decode steps of {model}",
                arguments=(
                    *(*_BENCH, "model", "--full", "--json", "--time-limit", "27"),
                    *("--model", model, "--batch", "1", "8", "32", "128", "256"),
                ),
                limit_s=40,
            )
            for model in _MODELS
        ),
        Part(
            name="idle",
            arguments=("-m", "tests.gpu.rates.idle", *models, "--device", "cuda", "--window", "2"),
            limit_s=60,
        ),
        Part(
            name="offline",
            arguments=(
                "-m",
                "tests.gpu.rates.offline",
                *models,
                "--device",
                "cuda",
                "--limit-s",
                "53",
            ),
            limit_s=110,
            least_s=40,
        ),
        Part(
            name="operations",
            arguments=(
                *(*_BENCH, "kernels", "--json", "--no-peers", "--time-limit", "40"),
                *("--model", *_MODELS, "--operation", "rows", "sampling", "patch"),
            ),
            limit_s=55,
            allowed_codes=(0, 1),
        ),
    ]
    return Stage(parts=parts, limit_s=sum(part.limit_s for part in parts))


def stages_on_cpu(folder: Path) -> list[Stage]:
    """
    Return the stages that a machine without a GPU can try: the same parts with next to no work.
    """
    on_cpu = ("--device", "cpu", "--num-threads", "1", "--cpu-extension", "off", "--json")
    models = ("--models", str(folder))
    quick = (*on_cpu, "--model", "tiny", "--seconds", "0.001")
    few_tests = ("tests/gpu/test_error.py", "-m", "not gpu", "-k", "norm")
    benches = [
        Part(
            name="roofline",
            arguments=(
                *(*_BENCH, "roofline", *on_cpu, "--model", "tiny"),
                *("--tb-per-s", "1", "--tflop-per-s", "1"),
            ),
            limit_s=180,
        ),
        *(
            Part(
                name=f"{operation} attention",
                arguments=(*_BENCH, "kernels", *quick, "--operation", operation),
                limit_s=60,
                allowed_codes=(0, 1),
            )
            for operation in ("decode", "prefill")
        ),
        Part(
            name="decode steps of tiny",
            arguments=(*_BENCH, "model", *quick, "--batch", "1", "2", "--context", "20"),
            limit_s=60,
        ),
        Part(
            name="idle",
            arguments=(
                *(
                    "-m",
                    "tests.gpu.rates.idle",
                    *models,
                    "--device",
                    "cpu",
                    "--tiny",
                    "--rows",
                    "2",
                ),
                *("--steps", "10"),
            ),
            limit_s=120,
        ),
        Part(
            name="offline",
            arguments=(
                *("-m", "tests.gpu.rates.offline", *models, "--device", "cpu", "--tiny"),
                *("--limit-s", "60"),
            ),
            limit_s=150,
        ),
    ]
    tests = Part(
        name="tests", arguments=(*_PYTEST, *few_tests), limit_s=120, least_s=0, read=count_tests
    )
    return [
        Stage(parts=[tests], limit_s=120),
        Stage(parts=benches, limit_s=sum(part.limit_s for part in benches)),
    ]


def _tests(
    folder: str, marked: str, *, limit_s: float, allowed_codes: tuple[int, ...] = (0,)
) -> list[Part]:
    """
    Return a part for each file of tests: what ends one process leaves the tests of other files.
    """
    files = sorted(path.relative_to(ROOT) for path in (ROOT / folder).glob("test_*.py"))
    files = [file for file in files if not any(map(file.match, WITHOUT_A_DEVICE))]
    return [
        Part(
            name=str(file),
            arguments=(*_PYTEST, str(file), "-m", marked),
            limit_s=limit_s,
            read=count_tests,
            allowed_codes=allowed_codes,
        )
        for file in files
    ]
