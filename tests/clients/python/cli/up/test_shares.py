"""Shares of a machine that `tandem up` gives to executors that serve together."""

from __future__ import annotations

import pytest

from tandem_client.cli.up.shares import Machine, shares, shares_of

GIB = 2**30
PLAN = {
    "device": "cpu",
    "sized_by_place": "default: 0.25 of the free memory, or one request of max_model_len",
    "sized_by_value": 8.0,
    "free_bytes": 34 * GIB,
    "weight_bytes": GIB // 2,
    "activation_bytes": GIB // 2,
    "kv_bytes_per_block": 2**20,
    "num_blocks": 10_000,
}
OPEN = {"num_threads": None, "device": "auto", "tp_size": 1, "pp_size": 1}
EIGHT = Machine(num_threads=8, num_gpus=0)


class TestCpu:
    def test_threads_and_memory_are_shared_out(self):
        """
        Each executor gets its part of the threads, and of the memory that one alone would take once
        the weights and activations of all have theirs.
        """
        blocks = (34 - 2) * 1024 // 4 // 2 - 1
        expected = [["--num-threads=4", f"--max-num-blocks={blocks}"]] * 2
        assert expected == shares(2, OPEN, PLAN, EIGHT)

    def test_more_executors_than_threads_have_one_each(self):
        """
        No executor is left without a thread or without a block.
        """
        plan = PLAN | {"free_bytes": 0}
        assert [["--num-threads=1", "--max-num-blocks=1"]] * 9 == shares(9, OPEN, plan, EIGHT)

    def test_none_has_more_than_one_alone_could_use(self):
        """
        Where memory is ample, each has what the most requests of the longest kind need.
        """
        plan = PLAN | {"num_blocks": 100}
        assert "--max-num-blocks=100" in shares(2, OPEN, plan, EIGHT)[0]

    def test_ranks_share_the_threads_of_their_executor(self):
        """
        Executors of several processes have so many threads that all processes together have all.
        """
        for sizes in ({"tp_size": 2}, {"pp_size": 2}):
            (first, _) = shares(2, OPEN | sizes, PLAN, EIGHT)
            assert "--num-threads=2" in first
        (first, _) = shares(2, OPEN | {"tp_size": 2, "pp_size": 2}, PLAN, EIGHT)
        assert "--num-threads=1" in first

    @pytest.mark.parametrize(
        ("settings", "plan", "left"),
        [
            ({"num_threads": 3}, {}, "--max-num-blocks"),
            ({}, {"sized_by_place": "flag"}, "--num-threads"),
            ({"num_threads": 3}, {"sized_by_place": "file"}, None),
        ],
    )
    def test_what_is_set_stays(self, settings, plan, left):
        """
        A setting of the user holds for each executor as it stands.
        """
        (first, _) = shares(2, OPEN | settings, PLAN | plan, EIGHT)
        assert ([] if left is None else [left]) == [one.partition("=")[0] for one in first]


class TestGpu:
    PLAN = PLAN | {
        "device": "cuda:0",
        "sized_by_place": "default",
        "sized_by_value": 0.9,
    }

    def test_each_has_a_gpu_of_its_own(self):
        """
        With enough GPUs each executor has one, with all of its memory.
        """
        machine = Machine(num_threads=8, num_gpus=4)
        assert [["--device=cuda:0"], ["--device=cuda:1"]] == shares(2, OPEN, self.PLAN, machine)

    def test_those_on_one_gpu_share_its_memory(self):
        """
        With fewer GPUs executors take them in turn, and those on one share its memory.
        """
        machine = Machine(num_threads=8, num_gpus=2)
        half = "--gpu-memory-utilization=0.4500"
        assert [["--device=cuda:0", half], ["--device=cuda:1"], ["--device=cuda:0", half]] == (
            shares(3, OPEN, self.PLAN, machine)
        )

    def test_ranks_of_an_executor_take_gpus_side_by_side(self):
        """
        An executor of several ranks is told the first of its GPUs; further ones take them in turn.
        """
        machine, ranks = Machine(num_threads=8, num_gpus=5), OPEN | {"tp_size": 2}
        first, second = shares(2, ranks, self.PLAN, machine)
        assert (["--device=cuda:0"], ["--device=cuda:2"]) == (first, second)
        half = "--gpu-memory-utilization=0.4500"
        assert ["--device=cuda:0", half] == shares(3, ranks, self.PLAN, machine)[2]
        stages = OPEN | {"pp_size": 2}
        assert ["--device=cuda:2"] == shares(2, stages, self.PLAN, machine)[1]

    def test_named_gpu_is_the_one(self):
        """
        A GPU that was named is shared by all, by the size that was set if there is one.
        """
        machine, named = Machine(num_threads=8, num_gpus=4), OPEN | {"device": "cuda:1"}
        assert [["--gpu-memory-utilization=0.4500"]] * 2 == shares(2, named, self.PLAN, machine)
        plan = self.PLAN | {"sized_by_place": "flag"}
        assert [[], []] == shares(2, named, plan, machine)


def test_one_alone_is_asked_for_nothing(monkeypatch):
    """
    One executor gets no argument, and nothing is found out for it.
    """
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("something was asked"))
    assert [[]] == shares_of(1, [], {})
