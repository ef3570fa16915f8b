"""Choice of the device that an executor computes on, and what it refuses to compute on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from executor_svc.device import choice
from executor_svc.device.choice import choose_kernels, resolve_device
from kernels import cpu_features
from kernels.cpu_extension import ExtensionUnavailable
from tandem.errors import InvalidConfig


@pytest.fixture
def two_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


class TestResolveDevice:
    def test_auto_takes_a_cuda_device_where_there_is_one(self, two_cuda_devices):
        """
        "auto" is the first CUDA device.
        """
        assert torch.device("cuda", 0) == resolve_device("auto")

    @pytest.mark.parametrize("name", ["auto", "cuda", "cuda:1"])
    def test_cuda_without_triton_is_refused(self, name, two_cuda_devices, monkeypatch):
        """
        A CUDA device is refused where Triton is not installed, with the extra to install, and never swapped for the CPU.
        """
        monkeypatch.setattr(choice, "find_spec", lambda _name: None)
        with pytest.raises(InvalidConfig, match=r"\[gpu\]"):
            resolve_device(name)

    @pytest.mark.parametrize(
        ("name", "complaint"),
        [("cuda:2", "there are 2 CUDA devices"), ("gpu", "must be auto, cpu, cuda or cuda:N")],
        ids=["absent", "unknown"],
    )
    def test_device_that_is_not_there_is_refused(self, name, complaint, two_cuda_devices):
        """
        A name or number that no device has is an error that says which there are.
        """
        with pytest.raises(InvalidConfig, match=complaint):
            resolve_device(name)


class TestChooseAttention:
    def test_unknown_word_is_refused(self):
        """
        The setting for attention in C++ is auto, on or off, whatever the device.
        """
        for name in ("cpu", "cuda"):
            with pytest.raises(InvalidConfig, match="must be auto, on or off, got 'maybe'"):
                choose_kernels(torch.device(name), "maybe")

    def test_library_that_is_wanted_and_missing_is_refused(self, monkeypatch: pytest.MonkeyPatch):
        """
        "on" without a library is a wrong setting, with the reason and what to set instead; a GPU needs none.
        """

        def missing(_wanted: str) -> None:
            raise ExtensionUnavailable("there is no C++ compiler")

        monkeypatch.setattr(choice, "use_cpu_extension", missing)
        with pytest.raises(
            InvalidConfig, match=r"no C\+\+ compiler; set it to auto or off"
        ) as refused:
            choose_kernels(torch.device("cpu"), "on")
        assert "cpu_extension" == refused.value.field
        choose_kernels(torch.device("cuda"), "on")


class TestBfloat16:
    @pytest.mark.parametrize(
        ("flags", "expected"),
        [
            ("fpu avx512f avx512_bf16", True),
            ("fpu amx_tile amx_bf16 amx_int8", True),
            ("fpu avx512f avx512_fp16 amx_tile amx_int8", False),
        ],
        ids=["avx512", "amx", "neither"],
    )
    def test_processors_say_so_by_their_flags(
        self, flags: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        """
        A processor multiplies bfloat16 if it has one of two extensions, whichever others it has.
        """
        (tmp_path / "cpuinfo").write_text(f"model name\t: Some CPU\nflags\t\t: {flags}\n")
        monkeypatch.setattr(cpu_features, "CPUINFO", tmp_path / "cpuinfo")
        assert expected is choice.cpu_multiplies_bfloat16()

    def test_a_processor_that_cannot_be_asked_does_not(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        """
        A processor without a list of flags counts as slow in bfloat16.
        """
        monkeypatch.setattr(cpu_features, "CPUINFO", tmp_path / "none")
        assert not choice.cpu_multiplies_bfloat16()
