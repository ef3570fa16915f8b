"""Where an executor computes, and what it refuses to compute on."""

from __future__ import annotations

import pytest
import torch

from executor_svc import device
from executor_svc.device import resolve_device
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
        monkeypatch.setattr(device, "find_spec", lambda _name: None)
        with pytest.raises(InvalidConfig, match=r"tandem-serve\[gpu\]"):
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
