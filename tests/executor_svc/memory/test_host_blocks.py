"""Swapping KV blocks to the host and back: nothing is lost, nothing else is touched."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_svc.memory import host_blocks
from executor_svc.memory.host_blocks import HostBlocks
from executor_svc.memory.kv_memory import KvMemory, host_blocks_within
from tandem.errors import InvalidConfig, OutOfMemory
from tandem.link.commands import KvMode
from tests.executor_svc.memory.test_kv_memory import SMALL
from tests.executor_svc.stepping import int32

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
NUM_BLOCKS, NUM_HOST_BLOCKS = 6, 5


def build(device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> KvMemory:
    """Return six blocks of random bits, NaN patterns among them, and five host blocks."""
    kv = KvMemory(
        SMALL, NUM_BLOCKS, 4, dtype, torch.device(device), num_host_blocks=NUM_HOST_BLOCKS
    )
    generator = torch.Generator().manual_seed(3)
    for layer in kv.layers:
        bits = torch.randint(0, 256, (layer.nbytes,), generator=generator, dtype=torch.uint8)
        layer.view(torch.uint8).copy_(bits.view(layer.view(torch.uint8).shape))
    return kv


def bits_of(kv: KvMemory, block: int) -> bytes:
    """All bits of a block, over all layers."""
    copies = (layer[block].clone().cpu() for layer in kv.layers)
    return b"".join(copy.view(torch.uint8).numpy().tobytes() for copy in copies)


@st.composite
def moves(draw: st.DrawFn) -> tuple[str, list[int], list[int]]:
    """One call of swap out, copy or swap in: sources, and destinations that are distinct."""
    kind = draw(st.sampled_from(["out", "copy", "in"]))
    num_sources = NUM_HOST_BLOCKS if kind == "in" else NUM_BLOCKS
    num_destinations = NUM_HOST_BLOCKS if kind == "out" else NUM_BLOCKS
    destinations = draw(
        st.lists(st.integers(1, num_destinations), min_size=1, max_size=5, unique=True)
    )
    size = len(destinations)
    sources = draw(st.lists(st.integers(1, num_sources), min_size=size, max_size=size))
    return kind, sources, destinations


class TestContents:
    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("blocks_per_part", [1, 2, 100])
    @settings(max_examples=40, deadline=None)
    @given(plan=st.lists(moves(), max_size=8))
    def test_any_sequence_of_swaps_and_copies_moves_exactly_the_named_bits(
        self, device: str, blocks_per_part: int, plan: list[tuple[str, list[int], list[int]]]
    ):
        """
        After any swaps and copies in any order, in transfers of any size, every block holds the bits that a table of
        blocks says.
        """
        kv = build(device)
        assert kv._host is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host_blocks, "_STAGING_BYTES", blocks_per_part * kv.bytes_per_block)
            on_device = {block: bits_of(kv, block) for block in range(NUM_BLOCKS + 1)}
            on_host = {block: bytes(kv.bytes_per_block) for block in range(1, NUM_HOST_BLOCKS + 1)}
            for kind, sources, destinations in plan:
                source, destination = int32(sources), int32(destinations)
                pairs = list(zip(sources, destinations, strict=True))
                if kind == "out":
                    kv.swap_out(source, destination)
                    on_host.update({there: on_device[here] for here, there in pairs})
                elif kind == "in":
                    kv.swap_in(source, destination)
                    on_device.update({there: on_host[here] for here, there in pairs})
                else:
                    rows = torch.from_numpy(source).long(), torch.from_numpy(destination).long()
                    kv.copy_blocks(*(row.to(device) for row in rows))
                    on_device |= {there: on_device[here] for here, there in pairs}
        assert on_device == {block: bits_of(kv, block) for block in range(NUM_BLOCKS + 1)}

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("device", DEVICES)
    def test_every_bit_comes_back(self, dtype: torch.dtype, device: str):
        """
        Swapping out to scattered host blocks and back to other blocks is exact in every number
        type.
        """
        kv = build(device, dtype)
        before = [bits_of(kv, block) for block in (2, 5, 1)]
        kv.swap_out(int32([2, 5, 1]), int32([4, 1, 2]))
        for layer in kv.layers:
            layer.fill_(7.0)
        kv.swap_in(int32([4, 1, 2]), int32([6, 2, 3]))
        assert before == [bits_of(kv, block) for block in (6, 2, 3)]

    def test_suspension_leaves_host_blocks_alone(self):
        """
        Swapped-out blocks come back after every kind of suspension, RECOMPUTE included.
        """
        kv = build()
        before = bits_of(kv, 3)
        kv.swap_out(int32([3]), int32([5]))
        for mode in KvMode:
            kv.suspend(mode)
            kv.resume()
        kv.swap_in(int32([5]), int32([1]))
        assert before == bits_of(kv, 1)


class TestMemory:
    def test_host_blocks_take_what_device_blocks_take(self):
        """
        A host block has exactly a device block's bytes, and none are taken unless asked for.
        """
        kv = build()
        assert NUM_HOST_BLOCKS * kv.bytes_per_block == kv._host._host.nbytes
        bare = KvMemory(SMALL, 2, 4, torch.float32, torch.device("cpu"))
        assert (0, None) == (bare.num_host_blocks, bare._host)

    def test_whole_blocks_fit_into_a_swap_space(self):
        """
        A swap space in GiB is rounded down to whole blocks; one that is no size is refused.
        """
        assert [0, 0, 1, 2] == [
            host_blocks_within(size / 2**30, 4096) for size in (0, 4095, 4096, 12287)
        ]
        for bad in (-0.1, float("nan"), float("inf"), 1e300):
            with pytest.raises(InvalidConfig, match="swap_space_gb must be at least 0"):
                host_blocks_within(bad, 4096)

    def test_more_than_the_host_has_is_refused(self, monkeypatch: pytest.MonkeyPatch):
        """
        Swap space that does not fit is an error naming the setting.
        """
        monkeypatch.setattr(host_blocks, "available_bytes", lambda _device: 1 << 30)
        layers = [torch.empty((2, 16, 2, 8, 128), dtype=torch.float32)]
        fitting = (1 << 30) // layers[0][0].nbytes
        with pytest.raises(OutOfMemory, match=r"free memory of 1\.00 GiB: lower swap_space_gb"):
            HostBlocks(fitting + 1, layers)

    def test_allocator_that_fails_names_the_setting(self, monkeypatch: pytest.MonkeyPatch):
        """
        Swap space that seems to fit but cannot be allocated is refused with its setting.
        """
        monkeypatch.setattr(host_blocks, "available_bytes", lambda _device: None)
        with pytest.raises(OutOfMemory, match="lower swap_space_gb"):
            HostBlocks(2**40, [torch.empty((2, 16, 2, 8, 128))])

    @pytest.mark.gpu
    @pytest.mark.skipif("cuda" not in DEVICES, reason="pages are locked for a CUDA device alone")
    def test_pages_are_locked_for_cuda(self):
        """
        Host blocks of a CUDA device are pinned.
        """
        kv = build("cuda")
        assert kv._host is not None
        assert kv._host.is_pinned


class Runtime:
    """Stands for CUDA's runtime: keeps what is locked; answers with an error code if told."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802  # its name
        assert flags == 0
        self.locked[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  # its name
        del self.locked[address]
        return 0


class TestLocking:
    @pytest.mark.slow
    def test_exactly_the_host_blocks_are_locked_while_they_live(
        self, monkeypatch: pytest.MonkeyPatch
    ):
        """
        The pages of all host blocks, and no more, are locked until the memory is gone.
        """
        runtime = Runtime()
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        memory = torch.zeros(5, 1000)
        host_blocks._lock_pages(memory)
        assert {memory.data_ptr(): 20_000} == runtime.locked
        view = memory[1]
        del memory
        gc.collect()
        assert [20_000] == list(runtime.locked.values())
        del view
        gc.collect()
        assert {} == runtime.locked

    def test_host_that_refuses_to_lock_is_out_of_memory(self, monkeypatch: pytest.MonkeyPatch):
        """
        Pages that cannot be locked are an error naming the setting and the limit.
        """
        monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(code=2))
        with pytest.raises(OutOfMemory, match=r"CUDA error 2\): lower swap_space_gb or raise"):
            host_blocks._lock_pages(torch.zeros(5))
