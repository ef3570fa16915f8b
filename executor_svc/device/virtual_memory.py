"""Virtual memory of a CUDA device: addresses that stay while memory is mapped and unmapped."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

from tandem.errors import InternalError, OutOfMemory, TandemError

_LIBRARY = "libcuda.so.1"
_OUT_OF_MEMORY = 2
_PINNED, _ON_DEVICE, _READ_WRITE, _MINIMUM = 1, 1, 3, 0
_FUNCTIONS = (
    "cuMemGetAllocationGranularity",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
)


class DriverMissing(RuntimeError):
    """The machine has no CUDA driver, or one without virtual memory (before CUDA 10.2)."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle_metadata", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class DriverLibrary:
    """The driver's functions, each called by name with numbers of the right width."""

    def __init__(self, library: Any) -> None:
        """`library`: has the functions as attributes, as `ctypes.CDLL` does."""
        missing = [name for name in _FUNCTIONS if not hasattr(library, name)]
        if missing:
            raise DriverMissing(f"the driver has no {', '.join(missing)}")
        self._library = library

    @classmethod
    def load(cls) -> DriverLibrary:
        """
        Load the driver of this machine.

        Raises:
            DriverMissing: There is no driver, or it is too old.
        """
        try:
            return cls(ctypes.CDLL(_LIBRARY))
        except OSError as error:
            raise DriverMissing(f"{_LIBRARY} cannot be loaded ({error})") from error

    def call(self, name: str, *arguments: Any) -> None:
        """
        Call a function.

        Raises:
            OutOfMemory: The device has no memory left.
            InternalError: The driver refuses for another reason.
        """
        function: Callable[..., int] = getattr(self._library, name)
        code = function(*arguments)
        if code == _OUT_OF_MEMORY:
            raise OutOfMemory(f"the device has no memory left for the KV ({name})")
        if code:
            raise InternalError(f"the CUDA driver refused {name}: error {code}")


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
        self._location = _Location(_ON_DEVICE, device_index)
        self._properties = _Properties(type=_PINNED, location=self._location)
        self._num_bytes = self._rounded(max(1, num_bytes))
        self._handle: list[int] = []
        """The memory's handle while it is mapped; empty otherwise."""
        address = ctypes.c_uint64()
        library.call(
            "cuMemAddressReserve",
            ctypes.byref(address),
            ctypes.c_size_t(self._num_bytes),
            ctypes.c_size_t(0),
            ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        )
        self.address = int(address.value)
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
        handle = ctypes.c_uint64()
        size, address = ctypes.c_size_t(self._num_bytes), ctypes.c_uint64(self.address)
        self._library.call(
            "cuMemCreate",
            ctypes.byref(handle),
            size,
            ctypes.byref(self._properties),
            ctypes.c_uint64(0),
        )
        try:
            zero = ctypes.c_size_t(0)
            self._library.call("cuMemMap", address, size, zero, handle, ctypes.c_uint64(0))
        except TandemError:
            self._library.call("cuMemRelease", handle)
            raise
        self._handle.append(int(handle.value))
        access = _Access(location=self._location, flags=_READ_WRITE)
        try:
            self._library.call(
                "cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1)
            )
        except TandemError:
            self.unmap()
            raise

    def unmap(self) -> None:
        """Give the memory back; the address stays reserved."""
        _unmap(self._library, self.address, self._num_bytes, self._handle)

    def _rounded(self, num_bytes: int) -> int:
        unit = ctypes.c_size_t()
        self._library.call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(unit),
            ctypes.byref(self._properties),
            ctypes.c_int(_MINIMUM),
        )
        return -(-num_bytes // unit.value) * unit.value


def _unmap(library: DriverLibrary, address: int, num_bytes: int, handle: list[int]) -> None:
    if handle:
        library.call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))
        library.call("cuMemRelease", ctypes.c_uint64(handle.pop()))


def _free(library: DriverLibrary, address: int, num_bytes: int, handle: list[int]) -> None:
    _unmap(library, address, num_bytes, handle)
    library.call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))
