"""The choice of an implementation: once, by configuration and device, and never silent."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog.testing
import torch

from kernels import dispatch
from kernels.dispatch import Deferred, Operation, TritonMissing, configure

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

    def test_offer_is_taken_until_it_is_withdrawn(self, operation: Operation):
        """
        An implementation that is offered for a device kind runs from then on, the others stay
        available, and withdrawing it brings them back.
        """
        assert operation.on(CPU)() == "quick"
        operation.offer("cpu", "quicker", lambda: "quicker")
        assert operation.on(CPU)() == "quicker"
        assert operation.on(CUDA)() == "plain"
        configure({"test_only": "simd"})
        assert operation.on(CPU)() == "quick"
        configure({})
        operation.withdraw("cpu", "quicker")
        assert operation.on(CPU)() == "quick"
        operation.withdraw("cpu", "never offered")
        assert operation.on(CPU)() == "quick"

    def test_unknown_names_are_refused(self, operation: Operation):
        """
        A misspelt operation or an implementation the device does not have is an error that lists what there is.
        """
        with pytest.raises(ValueError, match=r"no operation 'attention'; known: .*test_only"):
            configure({"attention": "reference"})
        configure({"test_only": "simd"})
        assert operation.on(CPU)() == "quick"
        with pytest.raises(
            ValueError, match="no implementation 'simd' for cuda; available: reference"
        ):
            operation.on(CUDA)


@pytest.fixture
def deferring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Operation]:
    """An operation with its code for CUDA in a module of its own, not imported yet."""
    (tmp_path / "deferred_kernel.py").write_text(
        "import triton\n\n\ndef quick():\n    return 'kernel'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deferred_kernel", raising=False)
    yield Operation("test_only", plain, {"cuda": ("triton", Deferred("deferred_kernel", "quick"))})
    sys.modules.pop("deferred_kernel", None)
    del dispatch._operations["test_only"]
    configure({})


class TestDeferred:
    def test_module_is_imported_by_the_device_that_needs_it(self, deferring, monkeypatch):
        """
        Code that needs Triton is imported when a device of its kind first asks, and not for others.
        """
        monkeypatch.setitem(sys.modules, "triton", sys)  # any module will do
        assert "plain" == deferring.on(CPU)()
        assert "deferred_kernel" not in sys.modules
        assert "kernel" == deferring.on(CUDA)()

    def test_missing_triton_is_an_error_that_says_what_to_install(self, deferring, monkeypatch):
        """
        Without Triton a CUDA device gets a typed error naming the extra, and never the definition in silence.
        """
        monkeypatch.setitem(sys.modules, "triton", None)
        with pytest.raises(TritonMissing, match=r"test_only on cuda needs .*tandem-serve\[gpu\]"):
            deferring.on(CUDA)
        configure({"test_only": "reference"})
        assert "plain" == deferring.on(CUDA)()

    def test_other_missing_modules_are_not_blamed_on_triton(self, deferring, tmp_path):
        """
        An import error stays what it is when anything but Triton is missing.
        """
        (tmp_path / "deferred_kernel.py").write_text("import no_such_module\n")
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):
            deferring.on(CUDA)
