"""Results that ranks compute together have the same bits on all of them."""

from __future__ import annotations

import pytest
import torch

from executor_svc.parallel.agreement import check_agreement
from executor_svc.parallel.collectives import AllRanks, TensorCollectives
from executor_svc.parallel.integers import IntegerCollectives
from executor_svc.parallel.process_groups import SINGLE, ProcessGroups
from tandem.errors import InvalidConfig
from tests.executor_svc.parallel.rank_pool import RankPool

ROUNDING = 1e-5
"""Room for the rounding of four float32 numbers of about 1."""
SHAPES = [(1, 64), (7, 33), (300, 64), (0, 8)]


def part_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator).to(dtype)


def sums(groups: ProcessGroups, ordered: bool) -> list[torch.Tensor]:
    ranks = TensorCollectives(groups, ordered=ordered)
    with torch.inference_mode():
        return [ranks.sum(part_of(groups.tensor_rank, shape)) for shape in SHAPES]


def integers_of(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-(2**61), 2**61, (3, 5), generator=generator).t()


def of_integers(groups: ProcessGroups) -> list[torch.Tensor]:
    ranks, rank = IntegerCollectives(groups), groups.tensor_rank
    each = (ranks.max, ranks.sum, ranks.gather)
    with torch.inference_mode():
        return [collective(integers_of(rank)) for collective in each]


def places(groups: ProcessGroups) -> tuple[int, int, list[object]]:
    values = AllRanks(groups).all_of(groups.tensor_rank or None)
    return groups.tensor_rank, groups.tensor_size, values


class TestSum:
    @pytest.mark.parametrize("ordered", [False, True], ids=["fast", "ordered"])
    @pytest.mark.parametrize("size", [2, 3, 4])
    def test_all_ranks_get_the_same_bits(self, ranks: RankPool, size: int, ordered: bool):
        """
        A sum is that of all ranks' parts, and equal on all of them bit for bit, for any shape.
        """
        found = ranks.run(size, sums, ordered)
        for index, shape in enumerate(SHAPES):
            expected = sum(part_of(rank, shape).double() for rank in range(size))
            assert torch.allclose(expected, found[0][index].double(), atol=ROUNDING)
            assert all(torch.equal(found[0][index], other[index]) for other in found)

    def test_ordered_sum_of_a_row_does_not_depend_on_other_rows(self, ranks: RankPool):
        """
        Elements are added up as a tree over ranks, wherever they are in the tensor.
        """
        (found, *_) = ranks.run(4, sums, True)
        for shape, total in zip(SHAPES, found, strict=True):
            a, b, c, d = (part_of(rank, shape) for rank in range(4))
            assert torch.equal((a + b) + (c + d), total)


class TestIntegers:
    @pytest.mark.parametrize("size", [2, 3, 4])
    def test_all_ranks_get_the_exact_result(self, ranks: RankPool, size: int):
        """
        The largest integers, exact sums of large ones, and all ranks' values in order, on each rank.
        """
        own = torch.stack([integers_of(rank) for rank in range(size)])
        for largest, total, gathered in ranks.run(size, of_integers):
            assert torch.equal(own.amax(dim=0), largest)
            assert torch.equal(own.sum(dim=0), total)
            assert torch.equal(own, gathered)

    def test_one_rank_gets_its_own(self):
        """
        A rank that is alone waits for none.
        """
        largest, total, gathered = of_integers(SINGLE)
        assert torch.equal(largest, total)
        assert torch.equal(integers_of(0)[None], gathered)


class TestGroups:
    def test_rank_knows_its_place(self, ranks: RankPool):
        """
        Each rank has its place in the group, and values are in the order of ranks, None among them.
        """
        assert [(rank, 3, [None, 1, 2]) for rank in range(3)] == ranks.run(3, places)

    def test_group_of_one_is_no_group(self, ranks: RankPool):
        """
        A model on one rank computes without any collective.
        """
        assert [(0, 1, [None])] == ranks.run(1, places)
        own = part_of(0, (2, 3))
        assert own is TensorCollectives(SINGLE).sum(own)


class TestAgreement:
    def test_rank_that_differs_is_named(self):
        """
        Ranks that would compute in another way than the first one are refused.
        """
        same = {"PyTorch": "2.13", "the number type": "float32"}
        check_agreement([same, same])
        with pytest.raises(InvalidConfig, match=r"PyTorch is 2\.12 on rank 1 and 2\.13 on rank 0"):
            check_agreement([same, {**same, "PyTorch": "2.12"}])
