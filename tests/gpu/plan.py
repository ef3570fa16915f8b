"""Which parts a run has, on a GPU and, all of them tiny, on a CPU."""

from __future__ import annotations

from pathlib import Path

from tests.gpu.parts import Part, count_tests

BUDGET_S = 525.0
"""Of the whole run: under nine minutes with what comes before and after."""

_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", "--timeout=120")
_BENCH = ("-m", "executor_svc.bench")
_MODELS = ("llama-8b", "llama-1b", "qwen3-0.6b")


def parts_on_gpu(folder: Path) -> list[Part]:
    """
    Correctness first: no rate is worth anything without it. Then what the aims are about, and the
    many small cases that the interpreter tries elsewhere last, for whatever time is left.

    Args:
        folder: Where parts keep models that more than one needs.
    """
    models = ("--models", str(folder))
    return [
        Part(
            name="tests",
            arguments=(*_PYTEST, "tests/gpu", "-m", "gpu"),
            limit_s=130,
            read=count_tests,
        ),
        Part(name="roofline", arguments=(*_BENCH, "roofline", "--json"), limit_s=25),
        Part(
            name="attention",
            arguments=(
                *(*_BENCH, "kernels", "--full", "--json", "--time-limit", "80"),
                *("--model", "llama-8b", "--operation", "decode", "prefill"),
            ),
            limit_s=95,
            allowed_codes=(0, 1),
        ),
        Part(
            name="decode steps",
            arguments=(
                *(*_BENCH, "model", "--full", "--json", "--time-limit", "80"),
                *("--model", *_MODELS, "--batch", "1", "8", "32", "128", "256"),
            ),
            limit_s=95,
        ),
        Part(
            name="idle",
            arguments=("-m", "tests.gpu.idle", *models, "--device", "cuda", "--window", "2"),
            limit_s=45,
        ),
        Part(
            name="offline",
            arguments=("-m", "tests.gpu.offline", *models, "--device", "cuda", "--limit-s", "60"),
            limit_s=130,
            least_s=40,
        ),
        Part(
            name="operations",
            arguments=(
                *(*_BENCH, "kernels", "--json", "--no-peers", "--time-limit", "40"),
                *("--model", *_MODELS, "--operation", "rows", "sampling", "patch"),
            ),
            limit_s=60,
            allowed_codes=(0, 1),
        ),
        Part(
            name="kernel tests",
            arguments=(*_PYTEST, "tests/kernels/triton", "-m", "not slow"),
            limit_s=150,
            read=count_tests,
        ),
    ]


def parts_on_cpu(folder: Path) -> list[Part]:
    """The same script with next to no work: what a machine without a GPU can try of it."""
    on_cpu = ("--device", "cpu", "--num-threads", "1", "--cpu-extension", "off", "--json")
    models = ("--models", str(folder))
    quick = (*on_cpu, "--model", "tiny", "--seconds", "0.001")
    return [
        Part(
            name="tests",
            arguments=(*_PYTEST, "tests/gpu/test_error.py", "-m", "not gpu", "-k", "norm"),
            limit_s=120,
            read=count_tests,
        ),
        Part(
            name="roofline",
            arguments=(
                *(*_BENCH, "roofline", *on_cpu, "--model", "tiny"),
                *("--tb-per-s", "1", "--tflop-per-s", "1"),
            ),
            limit_s=60,
        ),
        Part(
            name="attention",
            arguments=(*_BENCH, "kernels", *quick, "--operation", "decode", "prefill"),
            limit_s=60,
            allowed_codes=(0, 1),
        ),
        Part(
            name="decode steps",
            arguments=(*_BENCH, "model", *quick, "--batch", "1", "2", "--context", "20"),
            limit_s=60,
        ),
        Part(
            name="idle",
            arguments=(
                *("-m", "tests.gpu.idle", *models, "--device", "cpu", "--tiny", "--rows", "2"),
                *("--steps", "10"),
            ),
            limit_s=120,
        ),
        Part(
            name="offline",
            arguments=(
                *("-m", "tests.gpu.offline", *models, "--device", "cpu", "--tiny"),
                *("--limit-s", "60"),
            ),
            limit_s=150,
        ),
    ]
