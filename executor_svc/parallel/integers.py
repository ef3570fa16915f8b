"""Collectives on integers, exact in any order, as sampling from shared logits needs them."""

from __future__ import annotations

from torch import Tensor, distributed

from executor_svc.parallel.process_groups import ProcessGroups


class IntegerCollectives:
    """`kernels.sampling.Collectives` over the ranks of `ProcessGroups.tensor`."""

    def __init__(self, groups: ProcessGroups) -> None:
        self._group = groups.tensor
        self._size = groups.tensor_size

    def max(self, own: Tensor) -> Tensor:
        """Return the largest of all ranks' integers, element by element; may overwrite `own`."""
        return self._reduced(own, distributed.ReduceOp.MAX)

    def sum(self, own: Tensor) -> Tensor:
        """Return the sums of all ranks' integers, element by element; may overwrite `own`."""
        return self._reduced(own, distributed.ReduceOp.SUM)

    def gather(self, own: Tensor) -> Tensor:
        """Return the tensors of all ranks in one, in the order of ranks: ``[ranks, ...]``."""
        gathered = own.new_empty((self._size, *own.shape))
        if self._group is None:
            return gathered.copy_(own[None])
        distributed.all_gather(list(gathered), own.contiguous(), group=self._group)
        return gathered

    def _reduced(self, own: Tensor, operation: distributed.ReduceOp.RedOpType) -> Tensor:
        if self._group is None:
            return own
        own = own.contiguous()
        distributed.all_reduce(own, op=operation, group=self._group)
        return own
