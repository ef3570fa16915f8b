"""The share of a model that each rank holds, from sizes alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from executor_svc.model.config import read_model_config
from executor_svc.model.files import checkpoint
from executor_svc.model.files.checkpoint import Checkpoint, StoredTensor
from executor_svc.model.shares import sharding_of
from executor_svc.model.weights import load_weights
from executor_svc.parallel.sharding import ModelSizes, TensorSlice, shard, sum_chunks
from executor_svc.parallel.stages import stage_of
from tandem.errors import InvalidConfig
from tests.model_zoo import FAMILIES

SIZES = ModelSizes(
    num_heads=8, num_kv_heads=2, head_dim=16, intermediate_size=96, vocab_size=50, num_layers=7
)
CPU = torch.device("cpu")
LAYER = "model.layers.3."
REPLICATED = ("norm.weight", "layernorm.weight", "o_proj.bias", "down_proj.bias")
"""Ends of the names of tensors that every rank has whole."""


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Names of the tensors that were read, with the bytes of each piece."""
    read_into, found = checkpoint._read_into, []

    def counted(handle: BinaryIO, target: memoryview, tensor: StoredTensor) -> None:
        found.append((tensor.name, len(target)))
        read_into(handle, target, tensor)

    monkeypatch.setattr(checkpoint, "_read_into", counted)
    return found


def slice_of(name: str, rank: int, size: int) -> TensorSlice | None:
    return shard(SIZES, rank, size).slice_of(name)


class TestSlices:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("model.embed_tokens.weight", TensorSlice(0, 25, 50)),
            ("lm_head.weight", TensorSlice(0, 25, 50)),
            (LAYER + "self_attn.q_proj.weight", TensorSlice(0, 64, 128)),
            (LAYER + "self_attn.q_proj.bias", TensorSlice(0, 64, 128)),
            (LAYER + "self_attn.k_proj.weight", TensorSlice(0, 16, 32)),
            (LAYER + "self_attn.k_proj.bias", TensorSlice(0, 16, 32)),
            (LAYER + "self_attn.v_proj.weight", TensorSlice(0, 16, 32)),
            (LAYER + "self_attn.v_proj.bias", TensorSlice(0, 16, 32)),
            (LAYER + "self_attn.o_proj.weight", TensorSlice(1, 64, 128)),
            (LAYER + "mlp.gate_proj.weight", TensorSlice(0, 48, 96)),
            (LAYER + "mlp.gate_proj.bias", TensorSlice(0, 48, 96)),
            (LAYER + "mlp.up_proj.weight", TensorSlice(0, 48, 96)),
            (LAYER + "mlp.up_proj.bias", TensorSlice(0, 48, 96)),
            (LAYER + "mlp.down_proj.weight", TensorSlice(1, 48, 96)),
        ],
    )
    def test_second_of_two_ranks_holds_the_second_half(self, name: str, expected: TensorSlice):
        """
        Projections into heads and MLP are cut by rows with their biases, those out of them by
        columns, embedding and output projection by rows of the vocabulary.
        """
        assert expected == slice_of(name, 1, 2)

    @pytest.mark.parametrize(
        "name",
        [
            "model.norm.weight",
            LAYER + "input_layernorm.weight",
            LAYER + "post_attention_layernorm.weight",
            LAYER + "self_attn.q_norm.weight",
            LAYER + "self_attn.k_norm.weight",
            LAYER + "self_attn.o_proj.bias",
            LAYER + "mlp.down_proj.bias",
        ],
    )
    def test_norms_and_biases_after_a_sum_are_whole_on_every_rank(self, name: str):
        """
        A bias that is added after the sum over ranks is added once, so each rank has all of it.
        """
        assert [None] * 4 == [slice_of(name, rank, 4) for rank in range(4)]

    def test_one_rank_holds_whole_tensors(self):
        """
        A model that is not spread over ranks is read as it is stored.
        """
        assert slice_of(LAYER + "self_attn.q_proj.weight", 0, 1) is None
        assert SIZES == shard(SIZES, 0, 1).own

    def test_ranks_beyond_the_key_heads_share_them(self):
        """
        With two key heads on eight ranks, four neighbours hold the same one: that of their queries.
        """
        name = LAYER + "self_attn.k_proj.weight"
        first, second = TensorSlice(0, 0, 16), TensorSlice(0, 16, 32)
        assert [first] * 4 + [second] * 4 == [slice_of(name, rank, 8) for rank in range(8)]
        assert 1 == shard(SIZES, 5, 8).own.num_kv_heads

    def test_one_key_head_is_replicated_on_two_ranks(self):
        """
        Both of two ranks hold all of one key head, and half of the query heads that read it.
        """
        shares = [shard(replace(SIZES, num_kv_heads=1), rank, 2) for rank in range(2)]
        whole = TensorSlice(0, 0, 16)
        for name in (LAYER + "self_attn.k_proj.weight", LAYER + "self_attn.v_proj.weight"):
            assert [whole] * 2 == [share.slice_of(name) for share in shares]
        assert [(4, 1)] * 2 == [(each.own.num_heads, each.own.num_kv_heads) for each in shares]

    def test_vocabulary_that_does_not_divide_ends_with_padding(self):
        """
        All ranks have as many rows of the vocabulary, some of them not in use on the last ones.
        """
        sizes = replace(SIZES, vocab_size=5)
        shares = [shard(sizes, rank, 4) for rank in range(4)]
        assert [2, 2, 2, 2] == [share.own.vocab_size for share in shares]
        assert [[0, 1], [2, 3], [4], []] == [list(share.vocabulary) for share in shares]

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("size", [2, 4])
    def test_slices_of_all_ranks_cover_each_tensor(
        self, zoo: Callable[[str], Path], family: str, size: int
    ):
        """
        Of every tensor of every family the ranks together hold each element, once if its heads are
        as many as the ranks or more; only norms and biases after a sum are held by all.
        """
        config = read_model_config(zoo(family))
        shares = [sharding_of(config, rank, size) for rank in range(size)]
        for name, stored in Checkpoint.open(zoo(family)).tensors.items():
            slices = [share.slice_of(name) for share in shares]
            if name.endswith(REPLICATED):
                assert [None] * size == slices
                continue
            found = [index for part in slices for index in range(part.start, part.stop)]
            times = max(1, size // config.num_kv_heads) if ".k_" in name or ".v_" in name else 1
            length = stored.shape[slices[0].dim]
            assert sorted(list(range(length)) * times) == sorted(found)


class TestLayers:
    @pytest.mark.parametrize(
        ("num_layers", "num_stages", "expected"),
        [
            (4, 2, [range(2), range(2, 4)]),
            (7, 3, [range(3), range(3, 5), range(5, 7)]),
            (8, 3, [range(3), range(3, 6), range(6, 8)]),
            (3, 3, [range(1), range(1, 2), range(2, 3)]),
        ],
        ids=["even", "one-more", "two-more", "one-each"],
    )
    def test_first_stages_have_the_layers_that_are_left_over(
        self, num_layers: int, num_stages: int, expected: list[range]
    ):
        """
        Layers are divided in order and as evenly as they can be; the last stage, which samples too,
        never has more than another.
        """
        stages = [stage_of(num_layers, rank, num_stages) for rank in range(num_stages)]
        assert expected == [stage.layers for stage in stages]
        assert [True] + [False] * (num_stages - 1) == [stage.is_first for stage in stages]
        assert [False] * (num_stages - 1) + [True] == [stage.is_last for stage in stages]

    def test_only_stage_has_all_layers(self):
        """
        A model of one stage has its first and last layers there.
        """
        stage = stage_of(5, 0, 1)
        assert (range(5), True, True) == (stage.layers, stage.is_first, stage.is_last)

    @pytest.mark.parametrize(
        ("num_layers", "legal"), [(7, "legal sizes are 1 to 7"), (1, "legal size is 1")]
    )
    def test_more_stages_than_layers_are_refused_with_the_sizes_that_fit(
        self, num_layers: int, legal: str
    ):
        """
        Each stage needs a layer; the error names the numbers of stages that would do.
        """
        with pytest.raises(InvalidConfig, match=rf"pp_size 8 .*{legal}$"):
            stage_of(num_layers, 0, 8)


class TestReading:
    @pytest.mark.parametrize("family", ["llama_tied_biased", "qwen3"])
    def test_only_slices_are_read(
        self, zoo: Callable[[str], Path], read: list[tuple[str, int]], family: str
    ):
        """
        Each rank reads the bytes of its slices and of whole tensors from the files, and no others.
        """
        config, stored = read_model_config(zoo(family)), Checkpoint.open(zoo(family))
        for rank in range(4):
            share, expected = sharding_of(config, rank, 4), 0
            for name, tensor in stored.tensors.items():
                part = share.slice_of(name)
                length = 1 if part is None else part.stop - part.start
                whole = 1 if part is None else tensor.shape[part.dim]
                expected += tensor.num_bytes * length // whole
            read.clear()
            load_weights(config, stored, torch.float32, CPU, sharding=share)
            assert expected == sum(length for _, length in read)

    @pytest.mark.parametrize(
        ("family", "of_last"),
        [("qwen2", {"model.norm", "lm_head"}), ("qwen3", {"model.norm", "model.embed_tokens"})],
        ids=["own-output", "tied"],
    )
    def test_stage_reads_its_own_layers_alone(
        self, zoo: Callable[[str], Path], read: list[tuple[str, int]], family: str, of_last: set
    ):
        """
        The first stage reads the embedding too, the last one the norm and the output projection,
        which is the embedding if they are tied.
        """
        config, stored = read_model_config(zoo(family)), Checkpoint.open(zoo(family))
        for stage, others in enumerate([{"model.embed_tokens"}, of_last]):
            share = sharding_of(config, pipeline_rank=stage, pipeline_size=2)
            read.clear()
            load_weights(config, stored, torch.float32, CPU, sharding=share)
            layer = f"model.layers.{stage}."
            expected = {name for name in stored.tensors if name.startswith(layer)}
            expected |= {f"{module}.weight" for module in others}
            assert expected == {name for name, _ in read}


class TestSumChunks:
    @pytest.mark.parametrize(
        ("width", "chunks"),
        [(64, 4), (112, 4), (1536, 4), (8, 4), (100, 2), (12, 2), (98, 1), (2, 1), (33, 1), (1, 1)],
    )
    def test_they_are_as_many_as_cut_it_evenly(self, width: int, chunks: int):
        """
        A sum has the most of 4, 2 and 1 chunks that are equal and of an even width.
        """
        assert chunks == sum_chunks(width)

    def test_ranks_have_whole_chunks_or_one_of_their_own(self):
        """
        1, 2 and 4 ranks share the chunks of the whole; any other number of ranks has one each.
        """
        assert [4, 2, 1] == [sum_chunks(1536 // size, size) for size in (1, 2, 4)]
        assert [1, 1, 1] == [sum_chunks(1536 // size, size) for size in (3, 6, 8)]
        assert [2, 1, 1] == [sum_chunks(100 // size, size) for size in (1, 2, 4)]

    @pytest.mark.parametrize(
        ("changes", "sizes"),
        [({}, [1, 2, 4]), ({"intermediate_size": 100}, [1, 2]), ({"intermediate_size": 98}, [1])],
        ids=["multiples-of-8", "of-4", "of-2"],
    )
    def test_sizes_with_the_bits_of_one_rank_are_known(
        self, changes: dict[str, int], sizes: list[int]
    ):
        """
        So many ranks have the bits of one as have whole chunks of both sums.
        """
        whole = replace(SIZES, **changes)
        legal = [size for size in whole.legal_sizes() if shard(whole, 0, size).has_bits_of_one_rank]
        assert sizes == legal


class TestRefusal:
    @pytest.mark.parametrize(
        ("changes", "size", "legal"),
        [
            ({"num_heads": 9, "num_kv_heads": 3}, 2, "legal sizes are 1 and 3"),
            ({"num_heads": 6, "num_kv_heads": 3}, 2, "legal sizes are 1, 3 and 6"),
            ({"intermediate_size": 95}, 2, "legal size is 1"),
            ({}, 16, "legal sizes are 1, 2, 4 and 8"),
        ],
        ids=["heads", "three-key-heads-on-two", "mlp", "too-many"],
    )
    def test_size_that_does_not_divide_is_refused_with_those_that_do(
        self, changes: dict[str, int], size: int, legal: str
    ):
        """
        Query heads and the MLP's width must be divisible, key heads must divide or be divisible;
        the error names the sizes that would do.
        """
        with pytest.raises(InvalidConfig, match=rf"tp_size {size} .*{legal}$"):
            shard(replace(SIZES, **changes), 0, size)
