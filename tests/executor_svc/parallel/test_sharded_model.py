"""A model on several ranks answers what it answers on one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from executor_svc.model.config import read_model_config
from executor_svc.model.files.checkpoint import Checkpoint
from executor_svc.model.shares import sharding_of
from executor_svc.parallel.process_groups import SINGLE
from tests import model_zoo
from tests.executor_svc.parallel import workload
from tests.executor_svc.parallel.rank_pool import RankPool
from tests.executor_svc.parallel.workload import Answer, Held
from tests.truth.equality import Comparison, compared_length

Zoo = Callable[[str], Path]

TOLERANCE = 1e-4
"""Room for float32 sums in another order, as in the tests of one rank's logits."""
BFLOAT16_EPS = 2e-2
"""Logit noise of bfloat16; tiny models have many tokens that lead by less."""

ON_FOUR = {"llama_mqa": (), "llama_tied_biased": pytest.mark.slow, "qwen3": pytest.mark.slow}
"""Families of which four ranks are tried, and marks: that many share a machine's few cores."""
CASES = [
    *(pytest.param(family, 2, id=f"{family}-tp2") for family in model_zoo.FAMILIES),
    *(pytest.param(name, 4, id=f"{name}-tp4", marks=marks) for name, marks in ON_FOUR.items()),
]


@pytest.fixture(scope="session")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2 with a vocabulary that no number of ranks divides."""
    return model_zoo._write("odd", "Qwen2", tmp_path_factory.mktemp("odd"), vocab_size=317)


@pytest.fixture(scope="session")
def alone(zoo: Zoo) -> Callable[[Path], dict[str, Answer]]:
    """Answers of a directory's model on one rank."""
    known: dict[Path, dict[str, Answer]] = {}

    def answers(directory: Path) -> dict[str, Answer]:
        if directory not in known:
            known[directory] = workload.answers(directory=directory)
        return known[directory]

    return answers


def check_equal(expected: dict[str, Answer], found: list[dict[str, Answer]]) -> None:
    """Check that all ranks give one answer, and that it is equal to that of one rank."""
    comparison = Comparison()
    assert [found[0]] * len(found) == found
    for name, own in expected.items():
        given = found[0][name]
        comparison.check(own.tokens, given.tokens, own.margins, name)
        per_token = len(own.logprobs) // len(own.tokens)
        length = compared_length(own.margins) * per_token
        assert own.logprobs[:length] == pytest.approx(given.logprobs[:length], abs=TOLERANCE)
        assert own.prompt_logprobs == pytest.approx(given.prompt_logprobs, abs=TOLERANCE)
    comparison.assert_not_vacuous()


class TestTokens:
    @pytest.mark.slow
    @pytest.mark.parametrize(("family", "size"), CASES)
    def test_they_are_those_of_one_rank(
        self, zoo: Zoo, ranks: RankPool, alone, family: str, size: int
    ):
        """
        Greedy and seeded tokens of every family, with penalties, biases, allowed ids and windows,
        are equal on one rank and on several, and log probabilities close; all ranks draw the same.
        """
        directory = zoo(family)
        check_equal(alone(directory), ranks.run(size, workload.answers, directory))

    @pytest.mark.slow
    def test_vocabulary_may_end_inside_a_shard(self, odd: Path, ranks: RankPool, alone):
        """
        Rows of padding are never sampled and are in no log probability.
        """
        check_equal(alone(odd), ranks.run(4, workload.answers, odd))

    @pytest.mark.slow
    @pytest.mark.compiler
    def test_packed_matrices_give_the_same_tokens(self, zoo: Zoo, ranks: RankPool, alone):
        """
        Products of our own add up as those of PyTorch, between collectives and not in one call.
        """
        directory = zoo("llama_tied_biased")
        found = ranks.run(2, workload.answers, directory, kernels="on", packs=True)
        check_equal(alone(directory), found)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "kernels", ["off", pytest.param("on", marks=pytest.mark.compiler)], ids=["torch", "packed"]
    )
    def test_bfloat16_agrees_within_its_noise(self, zoo: Zoo, ranks: RankPool, kernels: str):
        """
        Parts of sums stay float32 and are rounded once: tokens agree as far as margins promise.
        """
        given = {"dtype": "bfloat16", "kernels": kernels, "packs": kernels == "on"}
        expected = workload.answers(directory=zoo("qwen3"), **given)
        found, other = ranks.run(2, workload.answers, zoo("qwen3"), **given)
        assert found == other
        lengths = []
        for name, own in expected.items():
            length = compared_length(own.margins, BFLOAT16_EPS)
            assert own.tokens[:length] == found[name].tokens[:length]
            lengths.append(length)
        assert sum(lengths) > 60


class TestSteps:
    @pytest.mark.slow
    def test_blocks_are_swapped_copied_shared_and_suspended_on_each_rank(
        self, zoo: Zoo, ranks: RankPool
    ):
        """
        Each rank does with its own heads of the blocks all that a batch says.
        """
        directory = zoo("llama_gqa_llama3_rope")
        expected = workload.journey(SINGLE, directory)
        for size in (2, 4):
            assert [expected] * size == ranks.run(size, workload.journey, directory)

    def test_batch_invariant_bits_hold_on_ranks(self, zoo: Zoo, ranks: RankPool):
        """
        A rank's logits of a prompt alone are, bit for bit, those beside others.
        """
        for own_alone, beside in ranks.run(4, workload.bits, zoo("llama_mha")):
            assert torch.equal(own_alone, beside)

    def test_collectives_of_a_step_follow_from_its_parameters(self, zoo: Zoo, ranks: RankPool):
        """
        After the layers, greedy rows take one collective, plain ones two, top_k or top_p six, both
        ten and logprobs one more; prompt logprobs take two. None sends a row of logits.
        """
        expected = {
            "greedy": 1,
            "plain": 2,
            "top_k": 6,
            "top_p": 6,
            "both": 10,
            "penalised": 1,
            "logprobs": 2,
            "prompt logprobs": 3,
        }
        for counts, most_numbers in ranks.run(2, workload.collectives, zoo("llama_mha")):
            assert expected == counts
            assert 256 == most_numbers  # buckets of a histogram; there are more logits

    def test_ranks_that_computed_something_else_find_out(self, zoo: Zoo, ranks: RankPool):
        """
        Ranks whose sums differ in a last bit all say so when they compare, and not before.
        """
        for size in (2, 4):
            for early, same, other in ranks.run(
                size, workload.compared, zoo("llama_mha"), size - 1
            ):
                assert ["", ""] == [early, same]
                assert "the ranks of a stage computed different hidden states" in other

    def test_parts_of_a_step_can_be_marked(self, zoo: Zoo, ranks: RankPool):
        """
        A profile sees each part of a rank's step, and leaves the next one as it was.
        """
        parts = {"apply", "compute", "forward", "attention", "mlp", "sample", "project"}
        assert [[parts, set()]] * 2 == ranks.run(2, workload.marked, zoo("llama_mha"))


def joined(name: str, parts: list[torch.Tensor], stacks: dict[str, list[int]]) -> torch.Tensor:
    """Put the ranks' parts of a tensor together; of stacked projections, those of each one."""
    kind = name.rpartition(".")[2]
    if kind in {"output", "down"}:
        return torch.cat(parts, dim=1)
    if kind in stacks:
        split = [part.split(stacks[kind]) for part in parts]
        return torch.cat([torch.cat(each) for each in zip(*split, strict=True)])
    if kind in {"embedding", "lm_head"}:
        return torch.cat(parts)
    assert all(torch.equal(parts[0], part) for part in parts)  # it is whole on every rank
    return parts[0]


class TestLoading:
    @pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
    def test_rank_with_other_files_is_refused(
        self, zoo: Zoo, ranks: RankPool, tmp_path: Path, name: str
    ):
        """
        Every rank answers for the files that it reads: where those of one differ by a byte, all
        ranks refuse the model and name that rank.
        """
        other = Path(shutil.copytree(zoo("llama_mha"), tmp_path / "other"))
        content = bytearray((other / name).read_bytes())
        content[-1] ^= 1 if name == "model.safetensors" else ord("}") ^ ord(" ")
        if name == "tokenizer.json":
            content += b"}"
        (other / name).write_bytes(content)
        texts = ranks.run(2, workload.refusal_of_engine, [zoo("llama_mha"), other])
        assert texts[0] == texts[1]
        assert "but the model is " in texts[0]
        assert "on rank 1" in texts[0]

    @pytest.mark.parametrize("family", ["llama_tied_biased", "qwen2", "qwen3"])
    def test_shards_put_together_are_the_whole(self, zoo: Zoo, ranks: RankPool, family: str):
        """
        Ranks read disjoint parts of the files that make up every tensor, and agree with one rank
        on the model's fingerprint.
        """
        whole: Held = workload.held(SINGLE, zoo(family))
        shares: list[Held] = ranks.run(2, workload.held, zoo(family))
        own = sharding_of(read_model_config(zoo(family)), size=2).own
        heads, kv_heads = own.num_heads * own.head_dim, own.num_kv_heads * own.head_dim
        stacks = {
            "qkv": [heads, kv_heads, kv_heads],
            "qkv_bias": [heads, kv_heads, kv_heads],
            "qk_norm": [own.num_heads, own.num_kv_heads],
            "gate_up": [own.intermediate_size] * 2,
            "gate_up_bias": [own.intermediate_size] * 2,
        }
        for name, tensor in whole.tensors.items():
            parts = [share.tensors[name] for share in shares]
            assert torch.equal(tensor, joined(name, parts, stacks)), name
        assert [whole.fingerprint] * 2 == [share.fingerprint for share in shares]

    def test_rows_of_padding_are_zeros(self, odd: Path, ranks: RankPool):
        """
        The last rank's table has as many rows as the others', of zeros after the vocabulary.
        """
        *_, last = ranks.run(4, workload.held, odd)
        for table in (last.tensors["embedding"], last.tensors["lm_head"]):
            assert 80 == len(table)
            assert not table[77:].any()
            assert table[76].any()

    @pytest.mark.parametrize(("family", "size"), [("qwen3", 2), ("llama_mqa", 4)])
    def test_rank_holds_its_share_and_what_is_replicated(
        self, zoo: Zoo, ranks: RankPool, family: str, size: int
    ):
        """
        The memory of a rank's weights is that of all weights divided by the ranks, plus tensors
        that are replicated; its KV memory is that of its heads.
        """
        whole = workload.held(SINGLE, zoo(family))
        config = read_model_config(zoo(family))
        stored = Checkpoint.open(zoo(family)).tensors
        norms = sum(each.num_bytes for name, each in stored.items() if "norm" in name)
        norms += 4 * config.num_layers * 2 * config.num_heads * config.head_dim * config.qk_norm
        key_heads = sum(each.num_bytes for name, each in stored.items() if ".k_" in name) * 2
        replicated = norms + (key_heads if size > config.num_kv_heads else 0)
        for share in ranks.run(size, workload.held, zoo(family)):
            assert share.memory_bytes == share.counted_bytes
            assert share.memory_bytes <= whole.memory_bytes / size + replicated
            assert share.kv_bytes == whole.kv_bytes // min(size, config.num_kv_heads)

    def test_size_that_does_not_divide_is_refused_on_every_rank(self, zoo: Zoo, ranks: RankPool):
        """
        No rank waits for another one that was refused.
        """
        found = ranks.run(3, workload.refusal, zoo("llama_mha"))
        assert found[0].endswith("legal sizes are 1, 2 and 4")
        assert [found[0]] * 3 == found


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
    def test_ranks_settle_on_one_plan(
        self, zoo: Zoo, ranks: RankPool, flags: tuple[str, ...], free_of_second: int
    ):
        """
        Ranks with different free memory have the same blocks, lengths and identity, and compute.
        """
        given = {"free_of_second": free_of_second}
        first, second = ranks.run(2, workload.engine, zoo("llama_mha"), *flags, **given)
        whole = workload.engine(SINGLE, zoo("llama_mha"), *flags, **given)
        assert first == second
        same = ("fingerprint", "num_parameters", "token")
        assert {name: whole[name] for name in same} == {name: first[name] for name in same}
        assert whole["kv_bytes_per_block"] == 2 * first["kv_bytes_per_block"]
        if not flags:
            assert first["num_blocks"] < whole["num_blocks"]
