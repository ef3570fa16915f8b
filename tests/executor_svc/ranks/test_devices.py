"""Which device each rank computes on."""

from __future__ import annotations

import pytest
import torch

from executor_svc.ranks import run
from executor_svc.ranks.place import RankPlace
from tandem.errors import InvalidConfig


def place(rank: int, *, starts_others: bool = True) -> RankPlace:
    return RankPlace(
        rank=rank, size=2, local_rank=rank, host="h", port=0, starts_others=starts_others
    )


class TestDevices:
    @pytest.fixture(autouse=True)
    def four_gpus(self, monkeypatch):
        monkeypatch.setattr(run, "resolve_device", torch.device)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

    @pytest.mark.parametrize(
        ("device", "found"), [("cuda", "cuda:1"), ("cuda:2", "cuda:3"), ("cpu", "cpu")]
    )
    def test_each_rank_has_a_gpu_of_its_own(self, device, found):
        """
        Ranks take GPUs side by side, from the one that is named on; on a CPU all are on it.
        """
        assert found == run.device_of(place(1), device)

    def test_too_few_gpus_are_refused_by_rank_0(self):
        """
        Rank 0 says how many there are; where a launcher starts the ranks, it gave them GPUs.
        """
        with pytest.raises(InvalidConfig, match="from cuda:3 on, but there are 4 CUDA devices"):
            run.device_of(place(0), "cuda:3")
        assert "cuda:3" == run.device_of(place(0, starts_others=False), "cuda:3")
