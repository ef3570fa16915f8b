"""Memory that goes and comes back at its address: of the CPU, and of a driver that only notes what it is asked."""

# ruff: noqa: N802  # the driver's own names

from __future__ import annotations

import contextlib
import gc
import sys
from enum import IntEnum
from types import SimpleNamespace

import pytest
import torch

from executor_svc.config.settings import load_settings
from executor_svc.device import fixed_memory as module
from executor_svc.device.fixed_memory import DevicePages, fixed_memory
from executor_svc.device.virtual_memory import CudaVirtualMemory, DriverLibrary
from executor_svc.engine import load_engine
from tandem.errors import InternalError, InvalidConfig, OutOfMemory

GRANULARITY = 2 << 20
ADDRESS = 0x7000_0000_0000
OUT_OF_MEMORY, INVALID_VALUE = 2, 1


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = INVALID_VALUE
    CUDA_ERROR_OUT_OF_MEMORY = OUT_OF_MEMORY


def described() -> SimpleNamespace:
    """Return a structure of the driver that has a location and is not filled in yet."""
    return SimpleNamespace(location=SimpleNamespace())


class Driver:
    """Part of `cuda.bindings.driver`; `calls` has what was asked, `codes` what is answered if not 0."""

    CUresult = Result
    CUmemAllocationProp = CUmemAccessDesc = staticmethod(described)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def __init__(self):
        self.calls = []
        self.codes = {}
        self._next_handle = 100

    def _note(self, name, *what):
        self.calls.append((name, *what))
        return Result(self.codes.get(name, 0))

    def cuMemGetAllocationGranularity(self, properties, option):
        assert (1, 1) == (properties.type, properties.location.type)
        assert 0 == option
        return Result.CUDA_SUCCESS, GRANULARITY

    def cuMemAddressReserve(self, size, alignment, wanted, flags):
        assert 0 == alignment == wanted == flags
        return self._note("reserve", size), ADDRESS

    def cuMemAddressFree(self, address, size):
        return (self._note("free", address, size),)

    def cuMemCreate(self, size, properties, flags):
        assert (3, 0) == (properties.location.id, flags)
        self._next_handle += 1
        return self._note("create", size), self._next_handle

    def cuMemRelease(self, handle):
        return (self._note("release", handle),)

    def cuMemMap(self, address, size, offset, handle, flags):
        assert 0 == offset == flags
        return (self._note("map", address, size, handle),)

    def cuMemUnmap(self, address, size):
        return (self._note("unmap", address, size),)

    def cuMemSetAccess(self, address, size, access, count):
        (one,) = access
        assert (1, 3, 3, 1) == (one.location.type, one.location.id, one.flags, count)
        return (self._note("access", address, size),)


def fail() -> None:
    """Fail as cuda-bindings does where the driver cannot be loaded or has not all functions."""
    raise RuntimeError("no such function")


@pytest.fixture
def driver() -> Driver:
    return Driver()


class TestOnACpu:
    def test_pages_go_and_come_back_at_their_address(self):
        """
        Memory that is given back loses its contents, and can be used again where it was.
        """
        memory = fixed_memory(3 << 20, torch.device("cpu"))
        assert (torch.uint8, (3 << 20,)) == (memory.tensor.dtype, tuple(memory.tensor.shape))
        address = memory.tensor.data_ptr()
        memory.tensor.fill_(7)
        memory.give_back()
        memory.take_back()
        assert 0 == int(memory.tensor.max())
        memory.tensor.fill_(9)
        assert (address, 9) == (memory.tensor.data_ptr(), int(memory.tensor.min()))

    @pytest.mark.slow
    def test_tensor_keeps_its_memory(self):
        """
        The memory lives as long as a tensor of it.
        """
        tensor = fixed_memory(1 << 20, torch.device("cpu")).tensor
        gc.collect()
        tensor.fill_(5)
        assert 5 == int(tensor.min())

    def test_system_that_keeps_pages_is_refused(self, monkeypatch):
        """
        The setting is refused by name on a system other than Linux.
        """
        monkeypatch.setattr(module, "sys", SimpleNamespace(platform="darwin"))
        with pytest.raises(InvalidConfig, match="require Linux on a CPU") as error:
            fixed_memory(100, torch.device("cpu"))
        assert "static_kv_memory_pointers" in error.value.message


class TestOnADevice:
    def test_memory_is_mapped_taken_away_and_mapped_where_it_was(self, driver):
        """
        An address is reserved once and sizes are rounded up to the driver's; each time memory comes it is created, mapped
        there and opened for reading and writing, each time it goes it is unmapped and released.
        """
        memory = CudaVirtualMemory(GRANULARITY + 1, 3, DriverLibrary(driver))
        size = 2 * GRANULARITY
        assert ADDRESS == memory.address
        memory.unmap()
        memory.unmap()
        memory.map()
        assert [
            ("reserve", size),
            ("create", size),
            ("map", ADDRESS, size, 101),
            ("access", ADDRESS, size),
            ("unmap", ADDRESS, size),
            ("release", 101),
            ("create", size),
            ("map", ADDRESS, size, 102),
            ("access", ADDRESS, size),
        ] == driver.calls

    def test_what_pytorch_keeps_is_given_back_before_memory_is_taken(self, monkeypatch, driver):
        """
        Memory that steps used meanwhile, and that PyTorch keeps for others, is free for the driver when pages are taken back.
        """
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: driver.calls.append(("emptied",)))
        monkeypatch.setattr(torch, "as_tensor", lambda *_, device: torch.empty(1))
        pages = DevicePages(GRANULARITY, torch.device("cuda", 0), DriverLibrary(driver))
        pages.give_back()
        driver.calls.clear()
        pages.take_back()
        assert [("emptied",), ("create", GRANULARITY)] == driver.calls[:2]

    @pytest.mark.slow
    @pytest.mark.parametrize("is_mapped", [True, False], ids=["mapped", "given-back"])
    def test_all_is_freed_with_the_object(self, driver, *, is_mapped):
        """
        With the last reference memory and address go back to the driver, whichever there are.
        """
        memory = CudaVirtualMemory(1, 3, DriverLibrary(driver))
        if not is_mapped:
            memory.unmap()
        driver.calls.clear()
        del memory
        gc.collect()
        freed = [("free", ADDRESS, GRANULARITY)]
        of_memory = [("unmap", ADDRESS, GRANULARITY), ("release", 101)]
        assert [*(of_memory if is_mapped else []), *freed] == driver.calls

    def test_device_without_memory_is_out_of_memory_and_can_be_asked_again(self, driver):
        """
        A device without free memory is an error of its own, and later attempts may succeed.
        """
        memory = CudaVirtualMemory(1, 3, DriverLibrary(driver))
        memory.unmap()
        driver.codes["create"] = OUT_OF_MEMORY
        with pytest.raises(OutOfMemory, match="no memory left for the KV"):
            memory.map()
        driver.codes.clear()
        memory.map()
        assert ("map", ADDRESS, GRANULARITY, 103) in driver.calls

    def test_memory_that_cannot_be_mapped_is_released(self, driver):
        """
        Memory that the driver refuses to map is released, and the error names the function.
        """
        driver.codes["map"] = INVALID_VALUE
        with pytest.raises(InternalError, match="refused cuMemMap: error 1"):
            CudaVirtualMemory(1, 3, DriverLibrary(driver))
        assert ("release", 101) in driver.calls
        gc.collect()
        assert ("free", ADDRESS, GRANULARITY) == driver.calls[-1]

    @pytest.mark.parametrize("refused", ["map", "access"])
    @pytest.mark.parametrize(
        ("code", "error"), [(OUT_OF_MEMORY, OutOfMemory), (INVALID_VALUE, InternalError)]
    )
    def test_memory_that_is_created_but_cannot_be_used_can_be_asked_for_again(
        self, driver, refused, code, error
    ):
        """
        Memory that the driver created is released, whatever it refuses afterwards and why, and a
        later attempt begins anew.
        """
        memory = CudaVirtualMemory(1, 3, DriverLibrary(driver))
        memory.unmap()
        driver.codes[refused] = code
        with pytest.raises(error):
            memory.map()
        assert ("release", 102) == driver.calls[-1]
        driver.codes.clear()
        memory.map()
        assert ("access", ADDRESS, GRANULARITY) == driver.calls[-1]
        assert ("map", ADDRESS, GRANULARITY, 103) == driver.calls[-2]

    @pytest.mark.parametrize(
        ("bindings", "why"),
        [
            (None, "cuda.bindings"),
            (
                SimpleNamespace(driver=SimpleNamespace(cuDriverGetVersion=fail)),
                "libcuda.so.1 cannot be loaded (no such function)",
            ),
        ],
        ids=["no-bindings", "no-driver"],
    )
    def test_machine_without_a_driver_is_refused_with_what_to_do(self, monkeypatch, bindings, why):
        """
        Without a CUDA driver, with one too old, or without cuda-bindings the setting is refused, and the error says what
        happens without it.
        """
        monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        with pytest.raises(InvalidConfig, match="Static KV memory pointers require") as error:
            fixed_memory(100, torch.device("cuda", 0))
        assert why in error.value.message
        assert "graphs are then captured again after a suspension" in error.value.message

    def test_driver_without_virtual_memory_is_refused_as_too_old(self, monkeypatch, driver):
        """
        A driver that loads and lacks a function is refused by that function's name, as one that is missing is.
        """
        monkeypatch.setattr(driver, "cuMemAddressReserve", lambda *_: fail())
        monkeypatch.setattr(DriverLibrary, "load", lambda: DriverLibrary(driver))
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        with pytest.raises(InvalidConfig, match="too old for cuMemAddressReserve"):
            fixed_memory(100, torch.device("cuda", 0))


class TestSetting:
    def test_kv_memory_keeps_its_addresses_where_that_is_asked_for(self, zoo):
        """
        `--static-kv-memory-pointers` has the executor's KV memory keep its addresses, and by default it does not.
        """
        flags = ["--model", str(zoo("llama_mha")), "--device=cpu", "--dtype=float32"]
        flags += ["--max-num-blocks=4", "--max-model-len=32", "--cpu-extension=off"]
        for asked in ([], ["--static-kv-memory-pointers"]):
            engine = load_engine(load_settings([*flags, *asked], {}), "boot")
            assert bool(asked) == engine.runner._kv.keeps_addresses
