"""The default size of the KV cache, used where no setting gives one."""

from __future__ import annotations

import pytest

from tandem.engine_config import EngineConfig
from tandem.errors import OutOfMemory
from tandem.kv_memory.budget import MemoryPlan, MemoryProbe, RankMemory, plan_kv
from tandem.kv_memory.default_size import CPU_SHARE, default_kv_size
from tandem.wording import GIB

MIB = 2**20


def rank(total_gib: float, free_gib: float, weights_gib: float, block: int = MIB) -> RankMemory:
    """
    Return a device of `total_gib`, with `free_gib` free before the weights and 1 GiB of
    activations.
    """
    probe = MemoryProbe(
        device="the device",
        total_bytes=int(total_gib * GIB),
        free_before_bytes=int(free_gib * GIB),
        free_after_bytes=int((free_gib - weights_gib) * GIB),
        weight_bytes=int(weights_gib * GIB),
        activation_bytes=GIB,
    )
    return RankMemory(block_bytes=block, probe=probe)


def plan(device: RankMemory, longest: int, *, on_gpu: bool, may_shorten: bool = True) -> MemoryPlan:
    limits = EngineConfig(max_model_len=longest)
    size = default_kv_size(limits, device, on_gpu=on_gpu, may_shorten=may_shorten)
    return plan_kv(size, [device], block_size=16, max_model_len=longest, may_shorten=may_shorten)


class TestGpu:
    def test_nine_tenths_of_the_device_hold_everything(self):
        """
        Weights, activations and KV take 0.9 of a GPU, as gpu_memory_utilization 0.9 does.
        """
        found = plan(rank(80, 79, 14), 4096, on_gpu=True)
        assert ("gpu_memory_utilization", 0.9, "default") == (
            found.size.knob,
            found.size.value,
            found.size.place,
        )
        assert int(0.9 * 80 * GIB - 15 * GIB) // MIB - 1 == found.num_blocks
        assert (4096, []) == (found.max_model_len, found.warnings())

    def test_other_processes_keep_what_they_have(self):
        """
        The default is 0.9 of what other processes leave if they hold more than a tenth of the GPU.
        """
        found = plan(rank(80, 40, 14), 4096, on_gpu=True)
        assert 0.45 == pytest.approx(found.size.value)
        assert "of what other processes leave" in found.size.place
        # Whole blocks of 1 MiB, one of which belongs to no request.
        assert (0.9 * 40 - 15) * GIB == pytest.approx(found.kv_bytes, abs=2 * MIB)

    def test_context_that_does_not_fit_is_lowered_with_a_warning(self):
        """
        A model's length that does not fit the KV cache is lowered; the warning names both lengths.
        """
        found = plan(rank(24, 24, 16), 131_072, on_gpu=True)
        assert found.num_blocks * 16 == found.max_model_len < 131_072
        (warning,) = found.warnings()
        assert f"max_model_len is {found.max_model_len}," in warning
        assert "instead of 131072: raise gpu_memory_utilization (0.9, default)" in warning

    def test_context_that_was_asked_for_is_refused(self):
        """
        A max_model_len that was set and does not fit is refused with the length that does.
        """
        device = rank(24, 24, 16)
        with pytest.raises(OutOfMemory, match=r"^To serve at least one request with the model's"):
            plan(device, 131_072, on_gpu=True, may_shorten=False)
        fits = plan(device, 131_072, on_gpu=True).max_model_len
        assert fits == plan(device, fits, on_gpu=True, may_shorten=False).max_model_len


class TestCpu:
    def test_small_model_takes_what_it_can_use(self):
        """
        A full batch of longest requests bounds the memory, however much is free.
        """
        found = plan(rank(256, 250, 1), 2048, on_gpu=False)
        assert 32 * 2048 // 16 == found.num_blocks
        assert "default: max_batch_size 32 requests of max_model_len 2048" == found.size.place

    def test_large_model_takes_a_share_of_what_is_free(self):
        """
        A CPU's KV cache takes a quarter of what weights and activations leave, if it can use that
        much.
        """
        found = plan(rank(32, 25, 4), 32_768, on_gpu=False)
        assert CPU_SHARE * 20 * GIB == found.kv_bytes
        assert (32_768, []) == (found.max_model_len, found.warnings())

    def test_length_that_was_asked_for_gets_its_memory(self):
        """
        A max_model_len that was set gets memory for one request, even above the share; one that was
        not set is lowered to the share.
        """
        device = rank(32, 25, 4)
        asked = plan(device, 160_000, on_gpu=False, may_shorten=False)
        assert (10_000, 160_000) == (asked.num_blocks, asked.max_model_len)
        lowered = plan(device, 160_000, on_gpu=False)
        assert (5 * 1024 - 1) * 16 == lowered.max_model_len
        assert lowered.wanted_len == 160_000

    def test_length_beyond_all_memory_is_refused_with_what_fits(self):
        """
        A max_model_len with more tokens than the memory holds is refused, naming the length that
        fits.
        """
        device = rank(32, 25, 4)
        fits = (20 * 1024 - 1) * 16
        with pytest.raises(OutOfMemory, match=f"lower max_model_len to {fits} or less"):
            plan(device, fits + 1, on_gpu=False, may_shorten=False)
        assert fits == plan(device, fits, on_gpu=False, may_shorten=False).max_model_len
