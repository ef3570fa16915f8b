"""Memory that is given back and comes back where it was: what holds its address need not change."""

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
    Bytes at an address that they keep.

    Attributes:
        tensor: uint8 ``[num_bytes]``; not to be touched while its memory is given back.
    """

    tensor: Tensor

    def give_back(self) -> None:
        """Give the memory to others, once nothing that runs uses it; the contents are lost."""

    def take_back(self) -> None:
        """
        Have memory at that address again, with any contents.

        Raises:
            OutOfMemory: Others have it.
        """


def fixed_memory(num_bytes: int, device: torch.device) -> FixedMemory:
    """
    Allocate; contents may be anything.

    Raises:
        InvalidConfig: This device or system cannot give memory back and keep its address.
        OutOfMemory: There is not so much.
    """
    if device.type == "cpu":
        return HostPages(num_bytes)
    try:
        library = DriverLibrary.load()
    except DriverMissing as error:
        raise InvalidConfig(
            f"Static KV memory pointers require virtual memory on {device}, where its pages can be "
            f"taken away and put back: {error}; leave static_kv_memory_pointers off: graphs are "
            "then captured again after a suspension",
            field="static_kv_memory_pointers",
        ) from error
    return DevicePages(num_bytes, device, library)


class HostPages:
    """Of the CPU: pages that Linux takes when told that nobody needs them."""

    def __init__(self, num_bytes: int) -> None:
        """
        Allocate.

        Raises:
            InvalidConfig: The system is not Linux: others keep the pages.
            OutOfMemory: The system has not so much.
        """
        if sys.platform != "linux":
            raise InvalidConfig(
                "Static KV memory pointers require Linux on a CPU, whose pages can be taken away "
                "and put back: leave static_kv_memory_pointers off",
                field="static_kv_memory_pointers",
            )
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # of shared pages the kernel would keep some
        try:
            self._pages = mmap.mmap(-1, max(1, num_bytes), flags=flags)
        except OSError as error:
            raise OutOfMemory(f"the host has no {num_bytes} bytes left for the KV") from error
        self.tensor = torch.frombuffer(self._pages, dtype=torch.uint8, count=num_bytes)

    def give_back(self) -> None:
        """As in `FixedMemory`."""
        self._pages.madvise(mmap.MADV_DONTNEED)

    def take_back(self) -> None:
        """As in `FixedMemory`; pages come when they are touched."""


class DevicePages:
    """Of a CUDA device: pages of its driver's virtual memory."""

    def __init__(self, num_bytes: int, device: torch.device, library: DriverLibrary) -> None:
        """
        Allocate.

        Raises:
            OutOfMemory: The device has not so much.
        """
        self._device = device
        with torch.cuda.device(device):
            self._memory = CudaVirtualMemory(num_bytes, torch.cuda.current_device(), library)
            self.tensor = torch.as_tensor(_Bytes(self._memory, num_bytes), device=device)

    def give_back(self) -> None:
        """As in `FixedMemory`; waits for what runs."""
        torch.cuda.synchronize(self._device)
        with torch.cuda.device(self._device):
            self._memory.unmap()

    def take_back(self) -> None:
        """As in `FixedMemory`."""
        with torch.cuda.device(self._device):
            self._memory.map()


class _Bytes:
    """What PyTorch makes a tensor of, which keeps this and so the memory."""

    def __init__(self, memory: CudaVirtualMemory, num_bytes: int) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (num_bytes,),
            "strides": None,
            "data": (memory.address, False),
        }
