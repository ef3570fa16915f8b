"""Sizes of an engine's parallelism: names, aliases and refusals."""

from __future__ import annotations

import pytest

from executor_svc.parallel.process_groups import ProcessGroups
from tandem_embedded import ConfigError, InferenceEngine
from tests.clients.embedded.parallel.fleet import fleet

TENSOR = ("tensor_model_parallel_size", "tensor_parallel_size", "tp_size")
PIPELINE = ("pipeline_model_parallel_size", "pipeline_parallel_size", "pp_size")


class TestSizes:
    def test_number_of_backends_may_be_given_as_well(self):
        """
        The size is that of the backends; another one is refused.
        """
        for name in ("data_parallel_size", "dp_size"):
            fleet(2, **{name: 2})
            with pytest.raises(ConfigError, match="data_parallel_size is 3, but 2 backends"):
                fleet(2, **{name: 3})

    def test_groups_need_one_of_all_ranks(self):
        """
        Ranks without a group of them all, which could not agree on steps, are refused.
        """
        with pytest.raises(ConfigError, match="no group of them all") as caught:
            InferenceEngine(pg_collection=ProcessGroups(None, tensor_size=2))
        assert "pg_collection" == caught.value.field

    @pytest.mark.parametrize("size", [0, -1, 1.5, True, "2"])
    @pytest.mark.parametrize(
        "name", ["data_parallel_size", "tensor_model_parallel_size", "pipeline_parallel_size"]
    )
    def test_size_must_be_a_number_of_at_least_one(self, name, size):
        """
        Other values are refused with the name that the engine has for it.
        """
        with pytest.raises(ConfigError, match="whole number of at least 1") as caught:
            InferenceEngine(**{name: size})
        assert name.replace("pipeline_", "pipeline_model_") == caught.value.field

    @pytest.mark.parametrize(
        ("name", "field"),
        [
            *((name, "tensor_model_parallel_size") for name in TENSOR),
            *((name, "pipeline_model_parallel_size") for name in PIPELINE),
        ],
    )
    def test_ranks_and_stages_need_a_group(self, name, field):
        """
        Without processes of torch.distributed there are no ranks; the error says how to start them,
        under each name of a size. A size of 1 needs none.
        """
        with pytest.raises(ConfigError, match="torchrun --nproc-per-node 2") as caught:
            InferenceEngine(**{name: 2})
        assert field == caught.value.field
        fleet(**{name: 1})

    def test_both_sizes_are_multiplied(self):
        """
        Each stage has as many ranks: so many processes are asked for.
        """
        with pytest.raises(ConfigError, match=r"is 2 x 3 = 6, .*torchrun --nproc-per-node 6"):
            InferenceEngine(tp_size=2, pp_size=3)

    @pytest.mark.parametrize("name", ["tp_size", "pp_size"])
    def test_runners_and_ranks_exclude_each_other(self, name):
        """
        A rank has one runner.
        """
        with pytest.raises(ConfigError, match="one engine for each group"):
            InferenceEngine(**{"dp_size": 2, name: 2})

    def test_size_has_one_name_at_a_time(self):
        """
        A name and its alias together are refused, even if they agree.
        """
        with pytest.raises(ConfigError, match="keep one of them"):
            fleet(2, data_parallel_size=2, dp_size=2)

    @pytest.mark.parametrize(
        ("name", "meant"),
        [("num_thread", "num_threads"), ("tensor_paralel_size", "tensor_parallel_size")],
    )
    def test_unknown_argument_is_refused_with_the_one_meant(self, name, meant):
        """
        A misspelt argument is a TypeError, as it is of any function.
        """
        with pytest.raises(TypeError, match=f"'{name}'. Did you mean '{meant}'"):
            InferenceEngine(**{name: 2})

    @pytest.mark.parametrize("collection", [object(), 2, "tp"])
    def test_collection_without_groups_is_refused(self, collection):
        """
        `pg_collection` must have groups.
        """
        with pytest.raises(ConfigError, match="pg_collection must be ProcessGroups"):
            InferenceEngine(pg_collection=collection)

    def test_list_of_devices_says_how_many_runners(self):
        """
        A list that contradicts the size, or is empty, is refused before anything is loaded.
        """
        with pytest.raises(ConfigError, match="data_parallel_size is 3, but 2 devices"):
            InferenceEngine(model_dir="nowhere", device=["cpu", "cpu"], data_parallel_size=3)
        with pytest.raises(ConfigError, match="at least one name"):
            InferenceEngine(model_dir="nowhere", device=[])
