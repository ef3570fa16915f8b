"""The choice of an implementation: once, by configuration and device, and never silent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog.testing
import torch

from kernels import dispatch
from kernels.dispatch import Operation, configure

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def plain() -> str:
    return "plain"


def quick() -> str:
    return "quick"


@pytest.fixture
def operation() -> Iterator[Operation]:
    yield Operation("test_only", plain, {"cpu": ("simd", quick)})
    del dispatch._operations["test_only"]
    configure({})


class TestChoice:
    def test_faster_implementation_serves_its_device_kind_only(self, operation: Operation):
        """
        A device kind without a faster implementation gets the reference.
        """
        assert operation.on(CPU)() == "quick"
        assert operation.on(CUDA)() == "plain"

    def test_choice_is_logged_once_per_device_kind(self, operation: Operation):
        """
        The first use names operation, device and implementation in the log; later ones are silent.
        """
        with structlog.testing.capture_logs() as logs:
            for device in (CPU, CPU, CUDA):
                operation.on(device)
        chosen = [(log["event"], log["device"], log["implementation"]) for log in logs]
        assert [("kernel_chosen", "cpu", "simd"), ("kernel_chosen", "cuda", "reference")] == chosen

    def test_configuration_wins(self, operation: Operation):
        """
        The reference can be asked for, and asked back.
        """
        operation.on(CPU)
        configure({"test_only": "reference"})
        assert operation.on(CPU)() == "plain"
        configure({})
        assert operation.on(CPU)() == "quick"

    def test_unknown_names_are_refused(self, operation: Operation):
        """
        A misspelt operation or an implementation the device does not have is an error that lists what there is.
        """
        with pytest.raises(ValueError, match=r"no operation 'attention'; known: .*paged_attention"):
            configure({"attention": "reference"})
        configure({"test_only": "simd"})
        assert operation.on(CPU)() == "quick"
        with pytest.raises(
            ValueError, match="no implementation 'simd' for cuda; available: reference"
        ):
            operation.on(CUDA)
