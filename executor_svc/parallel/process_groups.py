"""The groups of processes that one model is spread over."""

from __future__ import annotations

from dataclasses import dataclass

from torch import distributed


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """
    The groups of ranks that one model is spread over (Megatron: pg_collection).

    Attributes:
        tensor: Ranks that hold a part of every layer each; None for a model on one rank.
        tensor_rank: Place of this process among them.
        tensor_size: Number of these ranks.
    """

    tensor: distributed.ProcessGroup | None
    tensor_rank: int = 0
    tensor_size: int = 1

    @classmethod
    def of_tensor(cls, group: distributed.ProcessGroup) -> ProcessGroups:
        """Return the groups of a model whose layers are spread over `group`."""
        size = distributed.get_world_size(group)
        if size == 1:
            return SINGLE
        return cls(group, distributed.get_rank(group), size)


SINGLE = ProcessGroups(None)
"""The groups of a model that one process holds alone."""
