"""A model on several stages answers what it answers on one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from executor_svc.parallel.process_groups import SINGLE
from tests import model_zoo
from tests.executor_svc.parallel import staged_workload, workload
from tests.executor_svc.parallel.rank_pool import NUM_THREADS, RankPool, threads
from tests.executor_svc.parallel.workload import Held

Zoo = Callable[[str], Path]

STAGES = (1, 2)
"""Two stages of one rank each."""
ON_FOUR = ["llama_gqa_llama3_rope", "llama_tied_biased", "ministral_mixed", "qwen2_window", "qwen3"]
"""Families that together have all kinds of layers, tables and biases; on four processes."""


@pytest.fixture(scope="session")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama with three layers, which two stages cannot divide evenly."""
    return model_zoo._write("three", "Llama", tmp_path_factory.mktemp("three"), num_hidden_layers=3)


@pytest.fixture(autouse=True)
def threads_of_a_rank() -> Iterator[None]:
    """Let the one rank compute in as many threads as others: products are cut by their number."""
    with threads(NUM_THREADS):
        yield


class TestComparison:
    def test_ranks_compare_within_their_stage(self, zoo: Zoo, ranks: RankPool):
        """
        Hidden states differ from stage to stage: only the ranks of the stage with another sum say
        so, and stages of one rank compare nothing.
        """
        for size in (1, 2):
            planted = 2 * size - 1
            said = ranks.run_stages((size, 2), workload.compared, zoo("llama_mha"), planted)
            assert [["", ""]] * 2 * size == [each[:2] for each in said]
            told = [bool(last) for _, _, last in said]
            assert [False] * size + [size > 1] * size == told


class TestTokens:
    @pytest.mark.slow
    @pytest.mark.parametrize("family", model_zoo.FAMILIES)
    def test_two_stages_give_the_bits_of_one(self, zoo: Zoo, ranks: RankPool, family: str):
        """
        Greedy and seeded tokens of every family, with penalties, biases, allowed ids and windows,
        margins, and log probabilities of outputs and prompts are the same bits: each layer computes
        from the numbers that it computes from on one rank. The first stage has all of them.
        """
        expected = workload.answers(directory=zoo(family))
        assert [expected] * 2 == ranks.run_stages(STAGES, workload.answers, zoo(family))

    @pytest.mark.slow
    @pytest.mark.parametrize("family", ON_FOUR)
    def test_stages_of_two_ranks_give_the_bits_of_two_ranks(
        self, zoo: Zoo, ranks: RankPool, family: str
    ):
        """
        Stages whose layers are spread over ranks compute what these ranks compute without stages.
        """
        expected = ranks.run(2, workload.answers, zoo(family))
        assert expected * 2 == ranks.run_stages((2, 2), workload.answers, zoo(family))

    @pytest.mark.slow
    def test_layers_need_not_divide(self, three: Path, ranks: RankPool):
        """
        A stage may have a layer more than the next one.
        """
        expected = workload.answers(directory=three)
        assert [expected] * 2 == ranks.run_stages(STAGES, workload.answers, three)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "kernels", ["off", pytest.param("on", marks=pytest.mark.compiler)], ids=["torch", "packed"]
    )
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_types_and_packed_matrices_change_no_bit(
        self, zoo: Zoo, ranks: RankPool, kernels: str, dtype: str
    ):
        """
        Hidden states travel in the model's type, in which one rank rounds them between layers too.
        """
        given = {"dtype": dtype, "kernels": kernels, "packs": kernels == "on"}
        expected = workload.answers(directory=zoo("llama_tied_biased"), **given)
        found = ranks.run_stages(STAGES, workload.answers, zoo("llama_tied_biased"), **given)
        assert [expected] * 2 == found

    @pytest.mark.compiler
    def test_packed_layers_of_a_stage_are_one_call(self, zoo: Zoo, ranks: RankPool):
        """
        Each stage computes its layers as one rank computes all; ranks of a stage cannot.
        """
        directory = zoo("qwen2_window")
        assert [True] * 2 == ranks.run_stages(STAGES, staged_workload.is_stacked, directory)
        assert [False] * 4 == ranks.run_stages((2, 2), staged_workload.is_stacked, directory)


class TestSteps:
    @pytest.mark.parametrize("sizes", [(1, 2), (1, 3), (2, 2)], ids=["pp2", "pp3", "tp2-pp2"])
    def test_blocks_are_swapped_copied_shared_and_suspended_on_each_stage(
        self, three: Path, ranks: RankPool, sizes: tuple[int, int]
    ):
        """
        Each stage does with its own layers of the blocks all that a batch says.
        """
        expected = workload.journey(SINGLE, three)
        found = ranks.run_stages(sizes, workload.journey, three)
        assert [expected] * (sizes[0] * sizes[1]) == found

    @pytest.mark.parametrize("sizes", [(1, 2), (1, 3)], ids=["pp2", "pp3"])
    def test_steps_in_flight_read_the_tokens_of_those_before(
        self, three: Path, ranks: RankPool, sizes: tuple[int, int]
    ):
        """
        Mixed steps of prompts and decodes that are launched before earlier results are known get
        the same tokens and log probabilities, and all stages have the same tokens in their slots.
        """
        expected = staged_workload.in_flight(directory=three)
        first, *others = ranks.run_stages(sizes, staged_workload.in_flight, three)
        assert expected == first
        assert expected == others[-1]
        for other in others:
            assert expected.tokens == other.tokens
            assert (expected.checksum, expected.history) == (other.checksum, other.history)

    def test_stage_goes_on_with_another_lane_before_the_next_stage_begins(
        self, three: Path, ranks: RankPool
    ):
        """
        A step that needs no token of the step before does not wait for it: the first stage launches
        both while no other stage has begun.
        """
        expected = staged_workload.lanes(directory=three)
        for found in ranks.run_stages((1, 3), staged_workload.lanes, three):
            assert expected == found

    def test_part_of_a_prompt_is_done_when_the_last_stage_has_computed_it(
        self, zoo: Zoo, ranks: RankPool, tmp_path: Path
    ):
        """
        A step that samples nothing has no result before all stages have done it.
        """
        directory = zoo("llama_mha")
        found = ranks.run_stages(STAGES, staged_workload.chunked, directory, tmp_path / "begun")
        assert [True, True] == found

    def test_late_tokens_of_a_slot_leave_its_next_sequence_alone(
        self, three: Path, ranks: RankPool
    ):
        """
        Tokens that arrive after their slot went to another sequence change nothing that a stage on
        its own would not have changed.
        """
        expected = staged_workload.reused(directory=three)
        first, middle, last = ranks.run_stages((1, 3), staged_workload.reused, three)
        assert [expected, expected] == [first, last]
        assert (expected.tokens, expected.history) == (middle.tokens, middle.history)

    def test_errors_of_rows_reach_the_first_stage(self, zoo: Zoo, ranks: RankPool):
        """
        An unknown id, which all stages see, and logits of NaN, which only the last one sees, are
        errors of their rows on the stage that answers.
        """
        expected = [(0, "TOKEN_OUT_OF_RANGE"), (1, "INVALID_LOGITS")]
        assert expected == staged_workload.errors(directory=zoo("qwen2"))
        found = ranks.run_stages(STAGES, staged_workload.errors, zoo("qwen2"))
        assert [expected] * 2 == found

    def test_stages_go_on_after_a_refused_step(self, three: Path, ranks: RankPool):
        """
        A step that contradicts the slots is refused by every stage, with a step in flight whose
        result is never asked for; the next session computes as ever.
        """
        expected = staged_workload.refused(directory=three)
        assert 1 == len(expected)
        assert [expected] * 3 == ranks.run_stages((1, 3), staged_workload.refused, three)

    def test_parts_of_a_step_can_be_marked(self, zoo: Zoo, ranks: RankPool):
        """
        A profile sees the parts that a stage has: the last one alone samples.
        """
        parts = {"apply", "compute", "forward", "attention", "mlp"}
        last = parts | {"sample", "project"}
        expected = [[parts, set()], [last, set()]]
        assert expected == ranks.run_stages(STAGES, workload.marked, zoo("llama_mha"))


class TestLoading:
    @pytest.mark.parametrize("family", ["llama_tied_biased", "qwen2"])
    def test_stages_put_together_are_the_whole(self, zoo: Zoo, ranks: RankPool, family: str):
        """
        Layers, embedding, norm and output projection are each on one stage, but for a tied table,
        which is on the first and the last; all agree on the model's fingerprint.
        """
        whole: Held = workload.held(SINGLE, zoo(family))
        first, last = ranks.run_stages(STAGES, workload.held, zoo(family))
        empty = (last.tensors["embedding"], first.tensors["norm"], first.tensors["lm_head"])
        assert [0, 0, 0] == [tensor.numel() for tensor in empty]
        for name, tensor in whole.tensors.items():
            if name in {"embedding", "norm", "lm_head"}:
                found = (first if name == "embedding" else last).tensors[name]
            else:  # a stage counts its own layers from 0
                index, kind = name.split(".")
                found = (first, last)[int(index)].tensors[f"0.{kind}"]
            assert torch.equal(tensor, found), name
        assert [whole.fingerprint] * 2 == [first.fingerprint, last.fingerprint]
        twice = whole.tensors["lm_head"].nbytes if family == "llama_tied_biased" else 0
        assert whole.memory_bytes + twice == first.memory_bytes + last.memory_bytes
        assert first.memory_bytes == first.counted_bytes
        assert last.memory_bytes == last.counted_bytes
        assert whole.kv_bytes == first.kv_bytes + last.kv_bytes

    def test_more_stages_than_layers_are_refused_on_every_rank(self, zoo: Zoo, ranks: RankPool):
        """
        No stage waits for another one that was refused.
        """
        found = ranks.run_stages((1, 3), workload.refusal, zoo("llama_mha"))
        assert "pp_size 3 does not fit a model of 2 layers" in found[0]
        assert found[0].endswith("legal sizes are 1 to 2")
        assert [found[0]] * 3 == found

    def test_stage_with_other_files_is_refused(self, zoo: Zoo, ranks: RankPool, tmp_path: Path):
        """
        All stages refuse the model where the files of one differ by a byte, and name its rank.
        """
        other = Path(shutil.copytree(zoo("llama_mha"), tmp_path / "other"))
        content = bytearray((other / "model.safetensors").read_bytes())
        content[-1] ^= 1
        (other / "model.safetensors").write_bytes(content)
        texts = ranks.run_stages(STAGES, workload.refusal_of_engine, [zoo("llama_mha"), other])
        assert texts[0] == texts[1]
        assert "on rank 1" in texts[0]


class TestEngine:
    @pytest.mark.parametrize(
        ("flags", "free_of_second"),
        [
            ((), 40 << 20),
            (("--max-num-blocks=40", "--swap-space-gb=0.001"), 80 << 20),
            (("--gpu-memory-utilization=0.1",), 1 << 40),
        ],
        ids=["default", "blocks", "measured"],
    )
    def test_stages_settle_on_one_plan(
        self, three: Path, ranks: RankPool, flags: tuple[str, ...], free_of_second: int
    ):
        """
        Stages of different size and free memory have the same blocks on device and host, lengths
        and identity, and draw the token that one rank draws.
        """
        given = {"free_of_second": free_of_second}
        first, second = ranks.run_stages(STAGES, workload.engine, three, *flags, **given)
        whole = workload.engine(SINGLE, three, *flags, **given)
        assert 2 * second.pop("kv_bytes_per_block") == first.pop("kv_bytes_per_block")
        assert first == second
        same = ("fingerprint", "num_parameters", "token")
        assert {name: whole[name] for name in same} == {name: first[name] for name in same}
