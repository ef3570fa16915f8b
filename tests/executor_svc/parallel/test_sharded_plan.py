"""The memory plan of one rank, before anything is loaded and in a process that loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from executor_svc.config.settings import load_settings
from executor_svc.memory.plan import forecast
from tandem.errors import InvalidConfig
from tests.executor_svc.model.test_load_memory import write_zeros
from tests.executor_svc.parallel import workload
from tests.executor_svc.parallel.rank_pool import RankPool

ALLOWANCE_BYTES = 48_000_000
"""Memory beyond the weights: the piece that is read at a time, and pages of the allocator."""


def planned(directory: Path, tp_size: int) -> dict[str, object]:
    loaded = load_settings([f"--model={directory}", "--device=cpu", "--max-num-blocks=40"], {})
    return forecast(loaded, tp_size=tp_size)


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
