"""The size of the KV cache: each system's formula, derived again, and the text of each refusal."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import OutOfMemory
from tandem.kv_memory.budget import KvSize, MemoryProbe, RankMemory, block_bytes, plan_kv
from tandem.settings.schema import KV_SIZE_KNOBS
from tandem.wording import GIB

MIB = 2**20


def probe(**changes: object) -> MemoryProbe:
    """
    Return a device of 80 GiB, 79 of them free; weights take 14, activations 2, other memory 0.5
    GiB.
    """
    values = {
        "device": "cuda:0",
        "total_bytes": 80 * GIB,
        "free_before_bytes": 79 * GIB,
        "free_after_bytes": 79 * GIB - 14 * GIB - GIB // 2,
        "weight_bytes": 14 * GIB,
        "activation_bytes": 2 * GIB,
        "other_bytes": GIB // 2,
    }
    return MemoryProbe(**{**values, **changes})


def plan(knob: str, value: float, *, block: int = 8 * MIB, max_model_len: int = 2048, **changes):
    """
    Return a plan for one rank; blocks of 16 tokens take 8 MiB, as in a 7B model with 16-bit
    numbers.
    """
    rank = RankMemory(block_bytes=block, probe=probe(**changes))
    size = KvSize(knob=knob, value=value, place="--flag")
    return plan_kv(size, [rank], block_size=16, max_model_len=max_model_len)


def refusal(knob: str, value: float, **changes) -> str:
    with pytest.raises(OutOfMemory) as caught:
        plan(knob, value, **changes)
    return caught.value.message


class TestBlockBytes:
    def test_documented_example_is_exactly_eight_gib(self):
        """
        The documented 1,024 blocks of 16 tokens with 32 layers of 32 heads of 128 numbers of two
        bytes take 8,589,934,592 bytes.
        """
        block = block_bytes(
            num_layers=32, block_size=16, num_kv_heads=32, head_dim=128, bytes_per_number=2
        )
        assert 8 * MIB == block
        assert 8_589_934_592 == 1024 * block

    @pytest.mark.parametrize(
        ("kv_heads", "tp_size", "heads"), [(8, 1, 8), (8, 2, 4), (8, 8, 1), (8, 16, 1), (1, 4, 1)]
    )
    def test_grouped_heads_are_divided_over_ranks(self, kv_heads, tp_size, heads):
        """
        The KV heads of one rank count; with fewer heads than ranks each rank holds one.
        """
        assert 2 * 5 * 24 * heads * 64 * 4 == block_bytes(
            num_layers=5,
            block_size=24,
            num_kv_heads=kv_heads,
            head_dim=64,
            bytes_per_number=4,
            tp_size=tp_size,
        )


class TestFormulas:
    def test_blocks_are_usable_blocks(self):
        """
        The count max_num_blocks is of blocks that sequences can use; the dummy block comes on top.
        """
        found = plan("max_num_blocks", 1024)
        assert (1024, 1025 * 8 * MIB) == (found.num_blocks, found.kv_bytes)

    @pytest.mark.parametrize(
        ("gib", "usable"), [(20, 20 * 128 - 1), (8, 1023), (8 - 1e-6, 1022), (0.02, 1), (1e-9, 1)]
    )
    def test_buffer_is_divided_into_blocks_with_the_dummy(self, gib, usable):
        """
        The knob buffer_size_gb gives max(2, bytes // block bytes) blocks, one of them the dummy.
        """
        assert usable == plan("buffer_size_gb", gib).num_blocks

    def test_static_share_keeps_the_rest_of_the_device_free(self):
        """
        The knob mem_fraction_static f gives (free after weights - total x (1 - f)) // block bytes.
        """
        left = (79 - 14.5) * GIB - 80 * GIB * (1 - 0.88)
        assert int(left // (8 * MIB)) - 1 == plan("mem_fraction_static", 0.88).num_blocks

    def test_utilization_subtracts_everything_else(self):
        """
        The knob gpu_memory_utilization u gives (total x u - weights - activation peak - other
        growth) // block bytes.
        """
        left = 80 * GIB * 0.9 - (14 + 2 + 0.5) * GIB
        found = plan("gpu_memory_utilization", 0.9)
        assert int(left // (8 * MIB)) - 1 == found.num_blocks
        assert 80 * GIB * 0.9 - 8 * MIB < found.rank.probe.non_kv_bytes + found.kv_bytes

    def test_twice_the_bytes_per_token_give_half_the_blocks(self):
        """
        A block of twice the bytes halves the number of blocks, the dummy included.
        """
        small, large = (
            plan("gpu_memory_utilization", 0.9, block=size) for size in (8 * MIB, 16 * MIB)
        )
        assert (small.num_blocks + 1) // 2 == large.num_blocks + 1

    @pytest.mark.parametrize("knob", ["buffer_size_gb", "gpu_memory_utilization"])
    def test_the_rank_with_the_fewest_blocks_decides(self, knob):
        """
        Every pipeline stage holds as many blocks as the rank with the fewest can hold.
        """
        ranks = [
            RankMemory(block_bytes=size * MIB, probe=probe(device=f"cuda:{rank}"))
            for rank, size in enumerate((4, 9, 7))
        ]
        size = KvSize(knob=knob, value={"buffer_size_gb": 20}.get(knob, 0.9))
        found = plan_kv(size, ranks, block_size=16, max_model_len=2048)
        alone = plan_kv(size, ranks[1:2], block_size=16, max_model_len=2048)
        assert ("cuda:1", alone.num_blocks) == (found.rank.probe.device, found.num_blocks)

    @pytest.mark.slow
    @settings(max_examples=200, deadline=None)
    @given(
        num_blocks=st.integers(1, 4_000),
        block=st.integers(1, 16 * MIB),
        weights=st.integers(0, 10 * GIB),
        activations=st.integers(0, GIB),
        knob=st.sampled_from(KV_SIZE_KNOBS),
    )
    def test_equivalents_ask_for_the_same_blocks(
        self, num_blocks, block, weights, activations, knob
    ):
        """
        Each of the four values that a plan names gives that plan's blocks, on the same device.
        """
        changes = {
            "weight_bytes": weights,
            "activation_bytes": activations,
            "free_after_bytes": 79 * GIB - weights,
            "block": block,
            "max_model_len": 1,
        }
        value = plan("max_num_blocks", num_blocks, **changes).equivalents()[knob]
        if 0 < value < 1 or knob in {"max_num_blocks", "buffer_size_gb"}:
            assert num_blocks == plan(knob, value, **changes).num_blocks


class TestRefusals:
    def test_too_little_free_memory_at_start(self):
        """
        A utilization over what is free at startup is refused with both sizes and the advice to
        decrease it.
        """
        text = refusal("gpu_memory_utilization", 0.99, free_before_bytes=60 * GIB)
        assert text.startswith(
            "Free memory on device (60.00/80.00 GiB) on startup is less than desired GPU memory "
            "utilization (0.99, 79.20 GiB). Decrease GPU memory utilization or reduce GPU memory "
            "used by other processes."
        )
        assert "gpu_memory_utilization (--flag)" in text

    @pytest.mark.parametrize("utilization", [0.1, 0.2, 16.51 / 80])
    def test_no_memory_for_blocks(self, utilization):
        """
        A utilization that weights and activations use up is refused with the advice to increase it.
        """
        text = refusal("gpu_memory_utilization", utilization)
        assert text.startswith("No available memory for the cache blocks.")
        assert "weights take 14.00 GiB, activations 2.00 GiB and the rest 0.50 GiB" in text
        assert "increase gpu_memory_utilization" in text

    def test_no_memory_for_one_request(self):
        """
        A utilization with room for less than one longest request is refused with the length that
        fits.
        """
        text = refusal("gpu_memory_utilization", 17 / 80, max_model_len=2048)
        blocks = int(0.5 * GIB) // (8 * MIB) - 1
        assert text.startswith(
            "To serve at least one request with the model's max seq len (2048), (1.00 GiB KV cache "
            "is needed, which is larger than the available KV cache memory (0.49 GiB)."
        )
        assert f"the estimated maximum model length is {blocks * 16}." in text
        assert "Increase gpu_memory_utilization (0.2125, --flag) or decrease max_model_len" in text
        assert (
            blocks == plan("gpu_memory_utilization", 17 / 80, max_model_len=blocks * 16).num_blocks
        )

    def test_static_share_too_small(self):
        """
        A static share that leaves no memory for KV is refused with the advice to increase it.
        """
        text = refusal("mem_fraction_static", 0.15)
        assert text.startswith(
            "Not enough memory. Please try to increase --mem-fraction-static. At 0.15 (--flag) "
        )

    @pytest.mark.parametrize(
        ("knob", "value", "most"),
        [("max_num_blocks", 9000, "8255"), ("buffer_size_gb", 70, "64.5")],
    )
    def test_more_than_is_free_says_how_much_fits(self, knob, value, most):
        """
        Blocks or bytes that do not fit beside the weights are refused with the largest value that
        fits.
        """
        text = refusal(knob, value)
        assert f"lower {knob} ({value}, --flag), at most {most}" in text
        found = plan(knob, float(most))
        assert found.kv_bytes <= 64.5 * GIB
        assert (64.5 * GIB) // (8 * MIB) == found.num_blocks + 1

    def test_knob_below_one_longest_request_warns_only(self):
        """
        Blocks or bytes below one longest request give a warning that names the knob.
        """
        assert [] == plan("max_num_blocks", 128).warnings()
        (warning,) = plan("max_num_blocks", 127).warnings()
        assert "holds 2032 tokens and max_model_len is 2048" in warning
        assert "raise max_num_blocks or lower max_model_len" in warning
