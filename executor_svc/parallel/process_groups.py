"""The groups of processes that one model is spread over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from torch import distributed


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """
    The groups of ranks that one model is spread over (Megatron: pg_collection).

    Attributes:
        tensor: Ranks that hold a part of every layer of a stage each; None for one alone.
        tensor_rank: Place of this process among them.
        tensor_size: Number of these ranks.
        pipeline: Ranks that hold the same part of the layers of each stage, in the order of stages;
            None for a model of one stage.
        pipeline_rank: Place of this process among them, which is its stage.
        pipeline_size: Number of stages.
        tokens: The ranks of `pipeline` again, for what goes from the last stage to the others: a
            GPU's transfers of one group wait for each other.
        world: All ranks of the model, those of a stage next to each other; None for one alone.
        all_answer: True where every rank gives the results of steps, and not rank 0 alone.
    """

    tensor: distributed.ProcessGroup | None
    tensor_rank: int = 0
    tensor_size: int = 1
    pipeline: distributed.ProcessGroup | None = None
    pipeline_rank: int = 0
    pipeline_size: int = 1
    tokens: distributed.ProcessGroup | None = None
    world: distributed.ProcessGroup | None = None
    all_answer: bool = False

    @property
    def rank(self) -> int:
        """Place of this process among all ranks."""
        return self.pipeline_rank * self.tensor_size + self.tensor_rank

    @property
    def size(self) -> int:
        """Number of all ranks."""
        return self.pipeline_size * self.tensor_size

    @classmethod
    def of_tensor(cls, group: distributed.ProcessGroup) -> ProcessGroups:
        """Return the groups of a model whose layers are spread over `group`."""
        size = distributed.get_world_size(group)
        if size == 1:
            return SINGLE
        return cls(group, distributed.get_rank(group), size, world=group)

    @classmethod
    def of_stages(cls, tensor_size: int, num_stages: int, timeout: timedelta) -> ProcessGroups:
        """
        Form the groups of a model of several stages, which all processes of torch.distributed do
        together; the first ones hold the model. Ranks of a stage are neighbours, as in Megatron
        Core.

        Args:
            tensor_size: Number of ranks of each stage.
            num_stages: Number of stages.
            timeout: Longest time that a transfer waits for a rank.
        """
        size = tensor_size * num_stages
        stage, tensor_rank = divmod(distributed.get_rank(), tensor_size)

        def formed(groups: Iterable[range]) -> distributed.ProcessGroup | None:
            """Form groups, and return that of this process."""
            own = None
            for ranks in groups:
                group = distributed.new_group(list(ranks), timeout=timeout)
                if distributed.get_rank() in ranks:
                    own = group
            return own

        across = [range(first, size, tensor_size) for first in range(tensor_size)]
        beside = [range(first, first + tensor_size) for first in across[0]]
        return cls(
            formed(beside if tensor_size > 1 else []),
            tensor_rank,
            tensor_size,
            pipeline=formed(across),
            pipeline_rank=stage,
            pipeline_size=num_stages,
            tokens=formed(across),
            world=formed([range(size)]),
        )

    @classmethod
    def of_groups(
        cls,
        tensor: distributed.ProcessGroup,
        pipeline: distributed.ProcessGroup,
        world: distributed.ProcessGroup,
    ) -> ProcessGroups:
        """
        Return the groups of a model of several stages from groups that exist. Tokens share those of
        the hidden states, so that stages on GPUs wait for each other in every step.
        """
        size = distributed.get_world_size(tensor)
        return cls(
            tensor if size > 1 else None,
            distributed.get_rank(tensor),
            size,
            pipeline=pipeline,
            pipeline_rank=distributed.get_rank(pipeline),
            pipeline_size=distributed.get_world_size(pipeline),
            tokens=pipeline,
            world=world,
        )


SINGLE = ProcessGroups(None)
"""The groups of a model that one process holds alone."""
