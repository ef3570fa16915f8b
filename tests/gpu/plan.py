"""Parts of a run, on a GPU and, all of them tiny, on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.parts import ROOT, Part, count_tests

BUDGET_S = 545.0
"""Seconds for one command: under nine and a half minutes with what comes before and after."""
STAGES = ("kernels", "serving", "rest", "tuning")
"""Names of the stages: with all that belongs to one, a command stays within the budget."""

_PYTEST = (
    *("-m", "pytest", "-v", "-p", "no:cacheprovider", "--tb=short", "--color=no"),
    # Only this ends a test that waits for a device which never answers, and says where it waits.
    *("--timeout=100", "--timeout-method=thread"),
)
_BENCH = ("-m", "tandem_bench")
_MODELS = ("llama-8b", "llama-1b", "qwen3-0.6b")
_BATCHES = ("1", "8", "32", "128", "256")
_ENDING_S = 13.0
"""Seconds that a benchmark has for its start, and for the measurement that it is in when its time is up."""
_TOKENS_S = 70.0
_LAST_STEP_S = 30
"""Seconds that a profile or a sweep has for what it has begun when its time is up."""

WITHOUT_A_DEVICE = (
    "tests/gpu/test_run.py",  # is about this script
    "tests/gpu/test_results.py",  # likewise
    "tests/gpu/rates/test_*.py",  # is about what it calls
    "tests/gpu/rates/*/test_*.py",  # likewise
    "test_*compiled.py",  # compile for a device that need not be there
    "test_elementwise_launches.py",  # likewise
    "test_prefill_tiles.py",  # computes nothing
    "test_warm_up.py",  # likewise
    "test_triton_mode.py",  # hides the device
    "tests/kernels/triton/test_whole_model*.py",  # have the interpreter compute on the CPU
    "tests/kernels/triton/test_far_tensors.py",  # likewise
)
"""Tests that need no GPU, or that it would hinder; see `Path.match`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """
    Parts that follow each other.

    Attributes:
        stage: The one of `STAGES` that they belong to.
        parts: Parts in order.
        limit_s: Seconds for all of them.
        at_once: Number that run side by side: more than one where nothing is timed.
        is_timed: Something is timed, so that nothing else may run meanwhile.
    """

    stage: str
    parts: Sequence[Part]
    limit_s: float
    at_once: int = 1
    is_timed: bool = True


def groups_on_gpu(folder: Path) -> list[Group]:
    """
    Return all groups, the most important first: correctness, as no rate is worth anything without
    it, then what the aims are about, then the many small cases that the interpreter tries elsewhere,
    and last, for whatever time is left, what tells how to be faster.

    Parts are small, so that one which crashes or hangs does not stop the others.

    Args:
        folder: Where parts keep models that more than one needs.
    """
    # Tests that are slow in the interpreter take a device no longer than their compilation.
    kernel_tests = _tests("tests/kernels/triton", "", limit_s=300)
    return [
        Group(
            stage="kernels",
            parts=_tests("tests/gpu", "gpu", limit_s=120),
            limit_s=130,
            at_once=6,
            is_timed=False,
        ),
        Group(
            stage="serving",
            parts=[_script("tokens", "--device", "cuda", limit_s=_TOKENS_S)],
            limit_s=_TOKENS_S,
            is_timed=False,
        ),
        _in_turn(
            "kernels",
            [
                Part(name="roofline", arguments=(*_BENCH, "roofline", "--json"), limit_s=20),
                _decode_steps("llama-8b", 55),
                _decode_steps("llama-1b", 45),
                _attention("decode", 100),
            ],
        ),
        _in_turn("serving", _serving(folder)),
        _in_turn(
            "kernels",
            [
                _attention("prefill", 45),
                _decode_steps("qwen3-4b", 55),
                _decode_steps("qwen3-0.6b", 45),
            ],
        ),
        _in_turn("rest", [_operations()]),
        Group(stage="rest", parts=kernel_tests, limit_s=310, at_once=8, is_timed=False),
        _in_turn("tuning", _tuning("--device", "cuda", limits_s=(105, 425))),
    ]


def groups_on_cpu(folder: Path) -> list[Group]:
    """
    Return the groups that a machine without a GPU can try: the same parts with next to no work.
    """
    on_cpu = ("--device", "cpu", "--num-threads", "1", "--cpu-extension", "off", "--json")
    quick = (*on_cpu, "--model", "tiny", "--seconds", "0.001")
    tiny = ("--device", "cpu", "--tiny")
    models = ("--models", str(folder), *tiny)
    few_tests = ("tests/gpu/test_error.py", "-m", "not gpu", "-k", "norm")
    rates = ("--tb-per-s", "1", "--tflop-per-s", "1")
    batches = ("--batch", "1", "2", "--context", "20", "--beside-eager", "2")
    loads = ("--concurrency", "1", "2", "--input-len", "16", "--output-len", "8")
    kills = ("--streams", "2", "--kills", "2", "--tokens", "4")
    kernels = [
        Part(
            name="tests", arguments=(*_PYTEST, *few_tests), limit_s=240, least_s=0, read=count_tests
        ),
        Part(
            name="roofline",
            arguments=(*_BENCH, "roofline", *on_cpu, "--model", "tiny", *rates),
            limit_s=180,
        ),
        *(
            Part(
                name=f"{operation} attention",
                arguments=(*_BENCH, "kernels", *quick, "--operation", operation),
                limit_s=120,
            )
            for operation in ("decode", "prefill")
        ),
        Part(
            name="decode steps of tiny", arguments=(*_BENCH, "model", *quick, *batches), limit_s=120
        ),
    ]
    serving = [
        _script("tokens", *tiny, limit_s=300),
        _script("offline", *models, "--limit-s", "120", limit_s=400),
        _script("recovery", *models, *kills, limit_s=300),
        _script("serve", *models, *loads, limit_s=240),
        _script("idle", *models, "--rows", "2", "--steps", "10", limit_s=240),
    ]
    return [
        _in_turn("kernels", kernels),
        _in_turn("serving", serving),
        _in_turn("tuning", _tuning(*tiny, limits_s=(150, 400), fewest=("--most", "1"))),
    ]


def _serving(folder: Path) -> list[Part]:
    on_gpu = ("--models", str(folder), "--device", "cuda")
    return [
        _script("offline", *on_gpu, "--limit-s", "53", limit_s=125, least_s=50),
        _script("recovery", *on_gpu, "--limit-s", "95", limit_s=150, least_s=60),
        _script("serve", *on_gpu, "--window", "2", limit_s=110, least_s=40),
        _script("idle", *on_gpu, "--window", "2", limit_s=75, least_s=30),
    ]


def _tuning(*on: str, limits_s: tuple[int, int], fewest: tuple[str, ...] = ()) -> list[Part]:
    """Return the profile of steps and the sweep of tunings, with the seconds that each has."""
    trace_s, sweep_s = limits_s
    ends = [("--limit-s", str(limit_s - _LAST_STEP_S)) for limit_s in limits_s]
    return [
        _script("trace", *on, *ends[0], limit_s=trace_s),
        _script("sweep", *on, *ends[1], *fewest, limit_s=sweep_s, least_s=60),
    ]


def _operations() -> Part:
    return Part(
        name="operations",
        arguments=(
            *(*_BENCH, "kernels", "--json", "--no-peers", "--time-limit", "40"),
            *("--model", *_MODELS, "--operation", "rows", "sampling", "patch"),
        ),
        limit_s=55,
    )


def _attention(operation: str, limit_s: float) -> Part:
    """Return the part that measures attention with Llama-8B's heads, beside its peers."""
    return Part(
        name=f"{operation} attention",
        arguments=(
            *(*_BENCH, "kernels", "--full", "--json", "--time-limit", str(limit_s - _ENDING_S)),
            *("--model", "llama-8b", "--operation", operation),
        ),
        limit_s=limit_s,
    )


def _decode_steps(model: str, limit_s: float) -> Part:
    """Return the part that measures captured steps of a model, each beside an eager one."""
    return Part(
        name=f"decode steps of {model}",
        arguments=(
            *(*_BENCH, "model", "--full", "--json", "--time-limit", str(limit_s - _ENDING_S)),
            *("--model", model, "--batch", *_BATCHES, "--beside-eager", *_BATCHES),
        ),
        limit_s=limit_s,
    )


def _script(name: str, *arguments: str, limit_s: float, least_s: float = 10.0) -> Part:
    """Return the part that runs a module of `tests/gpu/rates`, which prints a JSON list."""
    return Part(
        name=name,
        arguments=("-m", f"tests.gpu.rates.{name}", *arguments),
        limit_s=limit_s,
        least_s=least_s,
    )


def _in_turn(stage: str, parts: Sequence[Part]) -> Group:
    return Group(stage=stage, parts=parts, limit_s=sum(part.limit_s for part in parts))


def tests_for_a_device(folder: str) -> list[Path]:
    """Return the files of tests in a folder and below it that a device is to run, from the root."""
    files = sorted(path.relative_to(ROOT) for path in (ROOT / folder).rglob("test_*.py"))
    return [file for file in files if not any(map(file.match, WITHOUT_A_DEVICE))]


def _tests(folder: str, marked: str, *, limit_s: float) -> list[Part]:
    """
    Return a part for each file of tests: what ends one process leaves the tests of other files.
    """
    return [
        Part(
            name=str(file),
            arguments=(*_PYTEST, str(file), "-m", marked),
            limit_s=limit_s,
            read=count_tests,
        )
        for file in tests_for_a_device(folder)
    ]
