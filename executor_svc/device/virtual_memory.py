"""Virtual memory of a CUDA device: addresses that stay while memory is mapped and unmapped."""

from __future__ import annotations

import weakref
from typing import Any

from tandem.errors import InternalError, OutOfMemory, TandemError

_LIBRARY = "libcuda.so.1"


class DriverMissing(RuntimeError):
    """The machine has no CUDA driver, one that is too old, or no cuda-bindings to call it with."""


class DriverLibrary:
    """The CUDA driver through cuda-bindings, with errors of ours for the codes that it returns."""

    def __init__(self, driver: Any) -> None:
        """`driver`: the module `cuda.bindings.driver`, or one with the same names."""
        self.driver = driver

    @classmethod
    def load(cls) -> DriverLibrary:
        """
        Load the driver of this machine.

        Raises:
            DriverMissing: There is no driver, it is too old, or cuda-bindings is not installed.
        """
        try:
            from cuda.bindings import driver  # noqa: PLC0415  # only where CUDA is

            driver.cuDriverGetVersion()  # the first call loads the library
        except ImportError as error:
            raise DriverMissing(f"cuda-bindings is not installed ({error})") from error
        except RuntimeError as error:
            raise DriverMissing(f"{_LIBRARY} cannot be loaded ({error})") from error
        return cls(driver)

    def call(self, name: str, *arguments: Any) -> Any:
        """
        Call a function and return its result, or None if it has none.

        Raises:
            DriverMissing: The driver has no such function.
            OutOfMemory: The device has no memory left.
            InternalError: The driver refuses for another reason.
        """
        try:
            code, *results = getattr(self.driver, name)(*arguments)
        except RuntimeError as error:  # cuda-bindings found no such function in this driver
            raise DriverMissing(f"the driver is too old for {name} ({error})") from error
        if code == self.driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise OutOfMemory(f"the device has no memory left for the KV ({name})")
        if code != self.driver.CUresult.CUDA_SUCCESS:
            raise InternalError(f"the CUDA driver refused {name}: error {int(code)}")
        return results[0] if results else None


class CudaVirtualMemory:
    """
    Memory of a device at a reserved address, mapped at first and freed with the object.

    Source: suspension with kept addresses as in vLLM's sleep mode and torch_memory_saver.
    """

    def __init__(self, num_bytes: int, device_index: int, library: DriverLibrary) -> None:
        """
        Args:
            num_bytes: Size, rounded up to the driver's granularity, 2 MiB as a rule.
            device_index: Index of the device; its context is current.
            library: The driver.

        Raises:
            OutOfMemory: The device has less memory left.
        """
        self._library = library
        driver = library.driver
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._access = driver.CUmemAccessDesc()
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        for location in (self._properties.location, self._access.location):
            location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            location.id = device_index
        self._num_bytes = self._rounded(max(1, num_bytes))
        self._handle: list[Any] = []
        """The memory's handle while it is mapped; empty otherwise."""
        self.address = int(library.call("cuMemAddressReserve", self._num_bytes, 0, 0, 0))
        arguments = (library, self.address, self._num_bytes, self._handle)
        end = weakref.finalize(self, _free, *arguments)
        end.atexit = False  # by then CUDA may be gone; the end of the process frees
        self.map()

    def map(self) -> None:
        """
        Map memory at the address; do nothing if it is mapped.

        Raises:
            OutOfMemory: The device has less memory left; nothing has changed.
            InternalError: The driver refuses for another reason; nothing has changed.
        """
        if self._handle:
            return
        handle = self._library.call("cuMemCreate", self._num_bytes, self._properties, 0)
        try:
            self._library.call("cuMemMap", self.address, self._num_bytes, 0, handle, 0)
        except TandemError:
            self._library.call("cuMemRelease", handle)
            raise
        self._handle.append(handle)
        try:
            self._library.call("cuMemSetAccess", self.address, self._num_bytes, [self._access], 1)
        except TandemError:
            self.unmap()
            raise

    def unmap(self) -> None:
        """Give the memory back; the address stays reserved."""
        _unmap(self._library, self.address, self._num_bytes, self._handle)

    def _rounded(self, num_bytes: int) -> int:
        flags = self._library.driver.CUmemAllocationGranularity_flags
        unit: int = self._library.call(
            "cuMemGetAllocationGranularity",
            self._properties,
            flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
        )
        return -(-num_bytes // unit) * unit


def _unmap(library: DriverLibrary, address: int, num_bytes: int, handle: list[Any]) -> None:
    if handle:
        library.call("cuMemUnmap", address, num_bytes)
        library.call("cuMemRelease", handle.pop())


def _free(library: DriverLibrary, address: int, num_bytes: int, handle: list[Any]) -> None:
    _unmap(library, address, num_bytes, handle)
    library.call("cuMemAddressFree", address, num_bytes)
