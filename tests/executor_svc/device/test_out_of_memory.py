"""A step that runs out of memory says which settings make such steps smaller."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from executor_svc.device.choice import is_sticky
from executor_svc.device.out_of_memory import is_out_of_memory
from tandem.errors import OutOfMemory
from tests.executor_svc.stepping import Bench, Row, batch

Zoo = Callable[[str], Path]
PETABYTE = 2**50

REFUSED = (
    "CUDA error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
)
"""Messages in which PyTorch tells of memory that CUDA could not allocate."""


@pytest.fixture
def bench(zoo: Zoo) -> Bench:
    """A runner with two sequences of which the first token is sampled."""
    bench = Bench.build(zoo("llama_mha"), kv_knob="gpu_memory_utilization")
    admits = [bench.admit(slot, [1, 2, 3]) for slot in (0, 1)]
    bench.runner.execute(batch(Row(0, 0, 3), Row(1, 0, 3), admits=admits), 1)
    return bench


def exhaust(bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    """Let forward passes ask for more than any machine has, or meet an error of a device."""

    def forward(*_arguments: object) -> torch.Tensor:
        if error is not None:
            raise error
        return torch.empty(PETABYTE)

    monkeypatch.setattr(bench.runner._decoder, "forward", forward)


PHASES = {
    "prefill": (
        [Row(0, 3), Row(1, 3), Row(2, 0, 4)],
        "while computing 6 tokens, prompts among them, (",
        "lower chunked_prefill_size or max_total_tokens, or lower gpu_memory_utilization",
        "max_batch_size",
    ),
    "decode": (
        [Row(0, 3), Row(1, 3)],
        "while decoding 2 sequences (",
        "lower max_batch_size, or lower gpu_memory_utilization",
        "max_total_tokens",
    ),
}


class TestAdvice:
    @pytest.mark.parametrize("phase", PHASES)
    @pytest.mark.parametrize(
        "error",
        [None, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")],
        ids=["host", "cuda"],
    )
    def test_advice_follows_what_the_step_was_doing(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, phase: str, error: Exception | None
    ):
        """
        Prompts advise smaller chunks, decodes fewer sequences, both a smaller KV by the knob that sized it.
        """
        rows, doing, advice, other = PHASES[phase]
        admits = [bench.admit(2, [1, 2, 3, 4])] if phase == "prefill" else []
        exhaust(bench, monkeypatch, error)
        with pytest.raises(OutOfMemory) as caught:
            bench.runner.execute(batch(*rows, admits=admits), 2)
        text = caught.value.message
        assert doing in text
        assert advice in text
        assert other not in text
        assert "allocate" in text
        assert "\n" not in text

    def test_other_failures_stay_what_they_are(self, bench: Bench, monkeypatch: pytest.MonkeyPatch):
        """
        An error that is not about memory passes unchanged.
        """
        exhaust(bench, monkeypatch, RuntimeError("CUDA error: illegal memory access"))
        with pytest.raises(RuntimeError, match="illegal memory access"):
            bench.runner.execute(batch(Row(0, 3)), 2)

    def test_every_way_of_running_out_is_known(self):
        """
        The device's own error, the host's allocator and the interpreter's are all out of memory.
        """
        with pytest.raises(RuntimeError) as host:
            torch.empty(PETABYTE)
        assert is_out_of_memory(host.value)
        assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
        assert is_out_of_memory(MemoryError())
        assert not is_out_of_memory(ValueError("DefaultCPUAllocator"))

    @pytest.mark.parametrize("text", REFUSED)
    def test_memory_that_cuda_refuses_beside_the_allocator_is_no_lost_device(self, text: str):
        """
        Graphs, pinned memory and libraries of CUDA that get no memory are out of memory, as tensors are, and leave the device usable; other failed calls lose it.
        """
        error = torch.AcceleratorError(f"{text}\nSearch for the error")
        assert not isinstance(error, torch.OutOfMemoryError)
        assert is_out_of_memory(error)
        assert not is_sticky(error)
        lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        assert not is_out_of_memory(lost)
        assert is_sticky(lost)
