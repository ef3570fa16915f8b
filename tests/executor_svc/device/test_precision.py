"""Precision of products on a GPU: set in an executor, warned of in a process of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from executor_svc import engine
from executor_svc.config.settings import load_settings
from executor_svc.device.precision import use_full_precision, warn_of_tf32
from executor_svc.start_warnings import kept_warnings

CUDA = torch.device("cuda", 0)
SWITCHES = (
    "allow_tf32",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
)


def switches() -> list[bool]:
    """Return the state of PyTorch's switches."""
    return [bool(getattr(torch.backends.cuda.matmul, name)) for name in SWITCHES]


@pytest.fixture
def rounding() -> Iterator[None]:
    """Turn on all that rounds products, as an environment or a caller may have done."""
    before = switches()
    for name in SWITCHES:
        setattr(torch.backends.cuda.matmul, name, True)
    yield
    for name, was_on in zip(SWITCHES, before, strict=True):
        setattr(torch.backends.cuda.matmul, name, was_on)


def test_executor_on_a_gpu_rounds_nothing(rounding: None):
    """
    Products and their sums keep their precision on a GPU, whatever the environment has turned on; for a CPU nothing is changed.
    """
    use_full_precision(torch.device("cpu"))
    assert [True, True, True] == switches()
    use_full_precision(CUDA)
    assert [False, False, False] == switches()


def test_precision_is_set_before_a_model_is_loaded(
    zoo: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    """
    The start of an executor sets the precision of its own device.
    """
    seen: list[torch.device] = []
    load = engine.load_model

    def loaded(*given: object, **options: object) -> object:
        assert [torch.device("cpu")] == seen
        return load(*given, **options)

    monkeypatch.setattr(engine, "use_full_precision", seen.append)
    monkeypatch.setattr(engine, "load_model", loaded)
    flags = ["--device=cpu", "--num-threads=1", "--max-num-blocks=8"]
    engine.load_engine(load_settings([f"--model={zoo('llama_mha')}", *flags], {}), "boot")
    assert [torch.device("cpu")] == seen


def test_caller_is_warned_of_tf32_and_its_switches_are_left_alone(rounding: None):
    """
    A model in float32 on a GPU, in a process that multiplies in TF32, has a warning that says what to call; one in 16 bits or on a CPU has none.
    """
    with kept_warnings() as kept:
        warn_of_tf32(CUDA, torch.bfloat16)
        warn_of_tf32(torch.device("cpu"), torch.float32)
        assert [] == kept
        warn_of_tf32(CUDA, torch.float32)
    assert "torch.set_float32_matmul_precision('highest')" in kept[0]
    assert [True, True, True] == switches()
    use_full_precision(CUDA)
    with kept_warnings() as kept:
        warn_of_tf32(CUDA, torch.float32)
    assert [] == kept
