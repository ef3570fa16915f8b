"""The memory plan of one rank, before anything is loaded and in a process that loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from executor_svc.config.settings import load_settings
from executor_svc.memory.activations import estimate_activations
from executor_svc.memory.plan import forecast
from executor_svc.model.config import read_model_config
from tandem.engine_config import EngineConfig
from tandem.errors import InvalidConfig
from tests.executor_svc.model.test_load_memory import write_zeros
from tests.executor_svc.parallel import workload
from tests.executor_svc.parallel.rank_pool import RankPool

ALLOWANCE_BYTES = 48_000_000
"""Memory beyond the weights: the piece that is read at a time, and pages of the allocator."""


def planned(directory: Path, tp_size: int, pp_size: int = 1, *flags: str) -> dict[str, object]:
    flags = (f"--model={directory}", "--device=cpu", "--max-num-blocks=40", *flags)
    return forecast(load_settings(flags, {}), tp_size=tp_size, pp_size=pp_size)


class TestForecast:
    def test_plan_of_a_rank_is_that_of_its_share(self, zoo: Callable[[str], Path], ranks: RankPool):
        """
        A dry run forecasts a rank's weights and blocks to the byte.
        """
        plan = planned(zoo("qwen3"), 2)
        for share in ranks.run(2, workload.held, zoo("qwen3")):
            assert share.counted_bytes == plan["weight_bytes"]
        whole = planned(zoo("qwen3"), 1)
        assert whole["kv_bytes_per_block"] == 2 * plan["kv_bytes_per_block"]
        assert whole["total_bytes"] // 2 == plan["total_bytes"]

    def test_size_that_does_not_divide_is_refused(self, zoo: Callable[[str], Path]):
        """
        A dry run refuses what a start would refuse.
        """
        with pytest.raises(InvalidConfig, match="legal sizes are 1, 2 and 4"):
            planned(zoo("qwen3"), 3)
        with pytest.raises(InvalidConfig, match=r"pp_size 3 .* legal sizes are 1 to 2"):
            planned(zoo("qwen3"), 1, 3)

    def test_plan_of_a_stage_is_that_of_its_layers(
        self, zoo: Callable[[str], Path], ranks: RankPool
    ):
        """
        A dry run forecasts the weights and blocks of the first stage where all have as many blocks,
        and as many host blocks as every stage has room for.
        """
        plan = planned(zoo("qwen2"), 1, 2, "--swap-space-gb=0.001")
        first, _ = ranks.run_stages((1, 2), workload.held, zoo("qwen2"))
        assert first.counted_bytes == plan["weight_bytes"]
        whole = planned(zoo("qwen2"), 1, 1, "--swap-space-gb=0.001")
        assert whole["kv_bytes_per_block"] == 2 * plan["kv_bytes_per_block"]
        assert 2 * whole["num_host_blocks"] <= plan["num_host_blocks"]
        assert whole["total_bytes"] // 2 == plan["total_bytes"]

    def test_stage_that_does_not_sample_needs_no_memory_for_logits(
        self, zoo: Callable[[str], Path]
    ):
        """
        Where logits are the most that a step holds, the stages before the last need less.
        """
        config, limits = read_model_config(zoo("qwen2")), EngineConfig(max_total_tokens=512)
        config = replace(config, vocab_size=100_000)
        first, last = (
            estimate_activations(
                config, limits, num_slots=4, dtype=torch.float32, is_last_stage=is_last
            )
            for is_last in (False, True)
        )
        assert last > 10 * first


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's counters")
class TestMemory:
    def test_rank_loads_no_more_than_its_share(
        self, tmp_path: Path, zoo: Callable[[str], Path], ranks: RankPool
    ):
        """
        Two ranks of a 425 MB model grow by half of its weights each, and what is replicated.
        """
        write_zeros(tmp_path, "F32", 4)
        for grown, weights in ranks.run(2, workload.growth, tmp_path, zoo("llama_mha")):
            assert 200e6 < weights < 215e6
            assert weights <= grown + ALLOWANCE_BYTES
            assert grown <= weights + ALLOWANCE_BYTES
