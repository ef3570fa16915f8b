"""
Memory that can be given back and taken back at the same address, so that captured graphs which hold
its address stay valid.
"""

from __future__ import annotations

import mmap
import sys
from typing import Protocol

import torch
from torch import Tensor

from executor_svc.device.virtual_memory import CudaVirtualMemory, DriverLibrary, DriverMissing
from tandem.errors import InvalidConfig, OutOfMemory


class FixedMemory(Protocol):
    """
    Memory at an address that does not change.

    Attributes:
        tensor: uint8 ``[num_bytes]``; must not be touched while the memory is given back.
    """

    tensor: Tensor

    def give_back(self) -> None:
        """Give the memory back, once no running work uses it; the contents are lost."""

    def take_back(self) -> None:
        """
        Have memory at that address again, with any contents.

        Raises:
            OutOfMemory: Other programs have taken it.
        """


def fixed_memory(num_bytes: int, device: torch.device) -> FixedMemory:
    """
    Allocate memory; its contents may be anything.

    Raises:
        InvalidConfig: This device or system cannot give memory back and keep its address.
        OutOfMemory: Less memory is free.
    """
    if device.type == "cpu":
        return HostPages(num_bytes)
    try:
        return DevicePages(num_bytes, device, DriverLibrary.load())
    except DriverMissing as error:
        raise InvalidConfig(
            f"Static KV memory pointers require virtual memory on {device}, where its pages can be "
            f"taken away and put back: {error}; leave static_kv_memory_pointers off: graphs are "
            "then captured again after a suspension",
            field="static_kv_memory_pointers",
        ) from error


class HostPages:
    """Memory of the CPU, in pages that Linux takes back when told that they are not needed."""

    def __init__(self, num_bytes: int) -> None:
        """
        Allocate.

        Raises:
            InvalidConfig: The system is not Linux; other systems keep the pages.
            OutOfMemory: The system has less memory left.
        """
        if sys.platform != "linux":
            raise InvalidConfig(
                "Static KV memory pointers require Linux on a CPU, whose pages can be taken away "
                "and put back: leave static_kv_memory_pointers off",
                field="static_kv_memory_pointers",
            )
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # the kernel would keep some pages if shared
        try:
            self._pages = mmap.mmap(-1, max(1, num_bytes), flags=flags)
        except OSError as error:
            raise OutOfMemory(f"the host has no {num_bytes} bytes left for the KV") from error
        self.tensor = torch.frombuffer(self._pages, dtype=torch.uint8, count=num_bytes)

    def give_back(self) -> None:
        """As in `FixedMemory`."""
        self._pages.madvise(mmap.MADV_DONTNEED)

    def take_back(self) -> None:
        """As in `FixedMemory`; the system gives pages when they are touched."""


class DevicePages:
    """Memory of a CUDA device, in pages of its driver's virtual memory."""

    def __init__(self, num_bytes: int, device: torch.device, library: DriverLibrary) -> None:
        """
        Allocate.

        Raises:
            OutOfMemory: The device has less memory left.
        """
        self._device = device
        with torch.cuda.device(device):
            self._memory = CudaVirtualMemory(num_bytes, torch.cuda.current_device(), library)
            self.tensor = torch.as_tensor(_Bytes(self._memory, num_bytes), device=device)

    def give_back(self) -> None:
        """As in `FixedMemory`; waits for running work."""
        torch.cuda.synchronize(self._device)
        with torch.cuda.device(self._device):
            self._memory.unmap()

    def take_back(self) -> None:
        """As in `FixedMemory`; gives back what PyTorch keeps, which the driver cannot use."""
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()
            self._memory.map()


class _Bytes:
    """Source of the tensor: PyTorch's tensor keeps a reference to it, and so the memory alive."""

    def __init__(self, memory: CudaVirtualMemory, num_bytes: int) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (num_bytes,),
            "strides": None,
            "data": (memory.address, False),
        }
