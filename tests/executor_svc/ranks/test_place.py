"""The place of a process among ranks, from its environment."""

from __future__ import annotations

import pytest

from executor_svc.ranks.place import place_of
from tandem.errors import InvalidConfig

TORCHRUN = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host"}
LEADER_WORKER_SET = {
    "LWS_WORKER_INDEX": "1",
    "LWS_GROUP_SIZE": "2",
    "LWS_LEADER_ADDRESS": "leader.svc",
}


class TestPlace:
    def test_process_without_launcher_is_rank_0_and_starts_the_others(self):
        """
        Without a launcher a process serves, and starts the other ranks on this machine.
        """
        place = place_of(2, {})
        assert (0, 2, "127.0.0.1", 0) == (place.rank, place.size, place.host, place.port)
        assert place.starts_others

    def test_torchrun_places_a_process(self):
        """
        The variables of torchrun give rank, size, GPU and meeting place; its agent keeps the store.
        """
        told = TORCHRUN | {"MASTER_PORT": "1234", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        place = place_of(2, told)
        assert (1, 0, "host", 1234) == (place.rank, place.local_rank, place.host, place.port)
        assert place.has_store
        assert not place.starts_others

    def test_leader_worker_set_places_a_process(self):
        """
        The variables of a LeaderWorkerSet do too; each pod's GPU is its first.
        """
        place = place_of(2, LEADER_WORKER_SET)
        assert (1, 0, "leader.svc", 29500) == (
            place.rank,
            place.local_rank,
            place.host,
            place.port,
        )
        assert not place.has_store

    def test_stages_make_up_the_ranks(self):
        """
        With stages a model has as many ranks as the product says, and a launcher must start them.
        """
        assert (4, 2) == (place_of(2, {}, pp_size=2).size, place_of(2, {}, pp_size=2).tp_size)
        place = place_of(1, TORCHRUN, pp_size=2)
        assert (1, 2, 1, 2) == (place.rank, place.size, place.tp_size, place.pp_size)
        words = "tp_size is 2 and pp_size 2, together 4, but the launcher .* speaks of 2 ranks"
        with pytest.raises(InvalidConfig, match=words):
            place_of(2, LEADER_WORKER_SET, pp_size=2)

    @pytest.mark.parametrize(
        ("changed", "words"),
        [
            ({"WORLD_SIZE": "3"}, "tp_size is 2, but the launcher .* speaks of 3 ranks"),
            ({"RANK": "2"}, "RANK must be below WORLD_SIZE, 2, got 2"),
            ({"RANK": "one"}, "RANK must be a number of 0 or more, got 'one'"),
            ({"MASTER_PORT": "-1"}, "MASTER_PORT must be a number"),
        ],
    )
    def test_contradicting_launcher_is_refused(self, changed, words):
        """
        Variables that are malformed, or speak of another number of ranks, are refused.
        """
        with pytest.raises(InvalidConfig, match=words):
            place_of(2, TORCHRUN | changed)
