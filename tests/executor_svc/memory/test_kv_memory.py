"""KV memory: its exact size, its copies and its suspensions."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from executor_svc.memory import kv_memory
from executor_svc.memory.kv_memory import KvMemory, kv_bytes_per_block
from executor_svc.model.config import ModelConfig
from executor_svc.model.rope import Rope
from tandem.errors import OutOfMemory
from tandem.link.commands import KvMode

CPU = torch.device("cpu")

LLAMA_7B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    norm_eps=1e-5,
    max_position_embeddings=4096,
    rope=Rope(),
    windows=(None,) * 32,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tied_embeddings=False,
    checkpoint_dtype="float16",
    eos_token_ids=(2,),
    generation_defaults={},
)

SMALL = dataclasses.replace(LLAMA_7B, num_layers=3, num_kv_heads=2, head_dim=8, windows=(None,) * 3)


@pytest.fixture(params=[False, True], ids=["moving", "static"])
def kv(request: pytest.FixtureRequest) -> KvMemory:
    """Six blocks of distinct numbers, in memory that may move and in memory that may not."""
    kv = KvMemory(SMALL, 6, 4, torch.bfloat16, CPU, keeps_addresses=request.param)
    for index, layer in enumerate(kv.layers):
        layer.copy_(torch.arange(layer.numel()).view(layer.shape) + index)
    return kv


class TestSize:
    def test_documented_example_is_exactly_eight_gib(self):
        """
        1,024 blocks of 16 tokens of a 7B model with 16-bit numbers take 8,589,934,592 bytes.
        """
        assert 1024 * kv_bytes_per_block(LLAMA_7B, 16, torch.float16) == 8_589_934_592
        assert 1024 * kv_bytes_per_block(LLAMA_7B, 16, torch.float32) == 2 * 8_589_934_592

    def test_grouped_heads_shrink_blocks(self):
        """
        Only key heads count.
        """
        grouped = dataclasses.replace(LLAMA_7B, num_kv_heads=8)
        assert 4 * kv_bytes_per_block(grouped, 16, torch.float16) == kv_bytes_per_block(
            LLAMA_7B, 16, torch.float16
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_formula_is_what_is_allocated(self, dtype: torch.dtype):
        """
        The tensors take the formula's bytes for the usable blocks and one dummy block.
        """
        kv = KvMemory(SMALL, 6, 7, dtype, CPU)
        assert 7 * 3 * 2 * 8 * 2 * dtype.itemsize == kv.bytes_per_block
        assert 7 * kv.bytes_per_block == kv.device_bytes

    def test_more_blocks_than_memory_is_refused_with_what_fits(
        self, monkeypatch: pytest.MonkeyPatch
    ):
        """
        An error about blocks that do not fit says how many would, the dummy block counted.
        """
        block = kv_bytes_per_block(SMALL, 4, torch.float32)
        monkeypatch.setattr(kv_memory, "available_bytes", lambda _device: 10 * block)
        with pytest.raises(OutOfMemory, match="lower max_num_blocks, at most 9 blocks fit"):
            KvMemory(SMALL, 10, 4, torch.float32, CPU)
        assert KvMemory(SMALL, 9, 4, torch.float32, CPU).num_blocks == 9

    def test_allocator_that_fails_names_the_setting(self, monkeypatch: pytest.MonkeyPatch):
        """
        Blocks that seem to fit but cannot be allocated are refused with the knob that sized them.
        """
        monkeypatch.setattr(kv_memory, "available_bytes", lambda _device: None)
        with pytest.raises(OutOfMemory, match="lower buffer_size_gb"):
            KvMemory(SMALL, 2**45, 4, torch.float32, CPU, kv_knob="buffer_size_gb")


class TestCopies:
    def test_all_sources_are_read_before_any_write(self, kv: KvMemory):
        """
        Copies inside one call do not see each other, in any layer.
        """
        before = [layer.clone() for layer in kv.layers]
        kv.copy_blocks(torch.tensor([1, 2]), torch.tensor([2, 5]))
        for layer, old in zip(kv.layers, before, strict=True):
            assert torch.equal(old[1], layer[2])
            assert torch.equal(old[2], layer[5])
            assert torch.equal(old[[0, 1, 3, 4, 6]], layer[[0, 1, 3, 4, 6]])


class TestSuspension:
    @pytest.mark.parametrize(("mode", "share"), [(KvMode.PERSIST, 1), (KvMode.OFFLOAD, 0)])
    def test_contents_come_back_bit_for_bit(self, kv: KvMemory, mode: KvMode, share: int):
        """
        OFFLOAD frees all device bytes, PERSIST none; both give every bit back, in the same tensors.
        """
        before = [layer.clone() for layer in kv.layers]
        tensors, full = kv.layers, kv.device_bytes
        kv.suspend(mode)
        assert kv.is_suspended
        assert share * full == kv.device_bytes
        kv.resume()
        assert not kv.is_suspended
        assert tensors is kv.layers
        assert full == kv.device_bytes
        for layer, old in zip(kv.layers, before, strict=True):
            assert torch.equal(old, layer)

    @pytest.mark.parametrize("mode", [KvMode.OFFLOAD, KvMode.RECOMPUTE], ids=lambda mode: mode.name)
    def test_static_memory_is_where_it_was(self, mode: KvMode):
        """
        Layers that keep their addresses have them after every suspension, and were really given back in between.
        """
        kv = KvMemory(SMALL, 6, 4, torch.bfloat16, CPU, keeps_addresses=True)
        before = [layer.data_ptr() for layer in kv.layers]
        for layer in kv.layers:
            layer.fill_(5.0)
        kv.suspend(mode)
        assert kv.device_bytes == 0
        kv.resume()
        assert before == [layer.data_ptr() for layer in kv.layers]
        left = {float(layer.max()) for layer in kv.layers}
        assert ({5.0} if mode is KvMode.OFFLOAD else {0.0}) == left

    @pytest.mark.parametrize("mode", [KvMode.OFFLOAD, KvMode.RECOMPUTE], ids=lambda mode: mode.name)
    def test_memory_that_others_took_can_be_had_later(
        self, monkeypatch: pytest.MonkeyPatch, mode: KvMode
    ):
        """
        A resume without memory fails and says so, the suspension goes on, and a later resume finds
        all.
        """
        kv = KvMemory(SMALL, 6, 4, torch.bfloat16, CPU)
        for index, layer in enumerate(kv.layers):
            layer.fill_(index)
        kv.suspend(mode)
        take_back, calls = kv_memory._MovingMemory.take_back, iter(range(3))

        def taken(self: kv_memory._MovingMemory) -> None:
            if next(calls) == 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            take_back(self)

        monkeypatch.setattr(kv_memory._MovingMemory, "take_back", taken)
        with pytest.raises(OutOfMemory, match="free what was taken meanwhile, then resume again"):
            kv.resume()
        assert kv.is_suspended
        monkeypatch.undo()
        kv.resume()
        assert not kv.is_suspended
        if mode is KvMode.OFFLOAD:
            assert [0.0, 1.0, 2.0] == [float(layer.max()) for layer in kv.layers]
        for layer in kv.layers:
            layer.fill_(3.0)

    def test_recompute_frees_and_gives_back_storage(self, kv: KvMemory):
        """
        RECOMPUTE drops the contents; after resume the memory can be written again.
        """
        full = kv.device_bytes
        kv.suspend(KvMode.RECOMPUTE)
        assert kv.device_bytes == 0
        kv.resume()
        assert full == kv.device_bytes
        kv.layers[2].fill_(3.0)
        assert (kv.layers[2] == 3.0).all()

    def test_repeated_suspend_and_resume_do_nothing(self, kv: KvMemory):
        """
        A second suspend keeps the first one's mode; a resume without suspend changes nothing.
        """
        before = kv.layers[0].clone()
        kv.resume()
        kv.suspend(KvMode.OFFLOAD)
        kv.suspend(KvMode.RECOMPUTE)
        kv.resume()
        kv.resume()
        assert torch.equal(before, kv.layers[0])

    @pytest.mark.parametrize(
        ("device", "num_layers"), [("meta", 3), ("cpu", 1)], ids=["device", "host"]
    )
    def test_offload_that_the_host_has_no_room_for_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, device: str, num_layers: int
    ):
        """
        OFFLOAD of more than the host's free memory is refused before anything is given back: all layers of a device, and of the host itself one, as each is freed once it is copied. Other modes need none.
        """
        kv = KvMemory(SMALL, 6, 4, torch.bfloat16, torch.device(device), kv_knob="buffer_size_gb")
        held, asked = kv.device_bytes, []

        def free(where: torch.device) -> int:
            asked.append(where)
            return num_layers * kv.layers[0].nbytes - 1

        monkeypatch.setattr(kv_memory, "available_bytes", free)
        with pytest.raises(OutOfMemory, match=r"PERSIST or RECOMPUTE.* buffer_size_gb"):
            kv.suspend(KvMode.OFFLOAD)
        assert not kv.is_suspended
        assert held == kv.device_bytes
        assert [CPU] == asked
        kv.check_suspension(KvMode.RECOMPUTE)
        kv.suspend(KvMode.PERSIST)
        kv.check_suspension(KvMode.OFFLOAD)
        assert [CPU] == asked
