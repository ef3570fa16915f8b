"""The processes that share an engine's model: the ranks of a torch.distributed group."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from executor_svc.device.idle_threads import let_idle_threads_sleep
from tandem.errors import InvalidConfig
from tandem_embedded.parallel.sizes import ParallelSizes, check_ranks, check_world

if TYPE_CHECKING:
    from executor_svc.parallel.process_groups import ProcessGroups

TRANSFER_S = 1800.0
"""Seconds that a stage waits for another one, as long as collectives do by PyTorch's default."""


def process_groups(sizes: ParallelSizes, pg_collection: object) -> ProcessGroups | None:
    """
    Return the ranks that share the model; None where this process has all of it. Groups are formed
    where none are given. All ranks call it together.

    Args:
        sizes: Sizes as given.
        pg_collection: `ProcessGroups`, or an object with Megatron's attributes `tp` and `pp`, and
            `mp` for stages in a part of the world, which are groups of torch.distributed. None
            takes the whole world if `sizes` ask for ranks.

    Raises:
        InvalidConfig: There is no such group, or it has another size, or none of all ranks is told.
    """
    if pg_collection is None and sizes.num_ranks == 1:
        return None
    let_idle_threads_sleep(os.environ)
    # This imports PyTorch, which must follow the change of the environment.
    from executor_svc.parallel.process_groups import ProcessGroups  # noqa: PLC0415

    if pg_collection is None:
        groups = _world(sizes)
    elif isinstance(pg_collection, ProcessGroups):
        groups = pg_collection
    else:
        groups = _collected(pg_collection)
    check_ranks(sizes, groups.tensor_size, groups.pipeline_size)
    if groups.size > 1 and groups.world is None:
        raise InvalidConfig(
            f"pg_collection has {groups.size} ranks and no group of them all, in which they agree "
            "on each step: set its attribute world, or use ProcessGroups.of_tensor or of_stages",
            field="pg_collection",
        )
    return None if groups.size == 1 else replace(groups, all_answer=True)


def _world(sizes: ParallelSizes) -> ProcessGroups:
    # These import PyTorch, as in `process_groups`.
    from torch import distributed  # noqa: PLC0415

    from executor_svc.parallel.process_groups import ProcessGroups  # noqa: PLC0415  # PyTorch

    if not (distributed.is_available() and distributed.is_initialized()):
        message = (
            f"{sizes.ranks_text}, which takes as many processes: start them with torchrun "
            f"--nproc-per-node {sizes.num_ranks}, and call "
            "torch.distributed.init_process_group() before the engine is made"
        )
        raise InvalidConfig(message, field=sizes.ranks_field)
    check_world(sizes, distributed.get_world_size())
    if sizes.pipeline not in (None, 1):
        timeout = timedelta(seconds=TRANSFER_S)
        return ProcessGroups.of_stages(sizes.tensor or 1, sizes.pipeline, timeout)
    # The world stays the caller's: functions of PyTorch keep it alive after it was destroyed.
    group = distributed.new_group()
    assert isinstance(group, distributed.ProcessGroup)
    return ProcessGroups.of_tensor(group)


def _collected(pg_collection: object) -> ProcessGroups:
    # These import PyTorch, as in `process_groups`.
    from torch import distributed  # noqa: PLC0415

    from executor_svc.parallel.collectives import AllRanks  # noqa: PLC0415  # PyTorch
    from executor_svc.parallel.process_groups import SINGLE, ProcessGroups  # noqa: PLC0415

    tensor, stages = getattr(pg_collection, "tp", None), getattr(pg_collection, "pp", None)
    if not isinstance(tensor, distributed.ProcessGroup):
        message = (
            "pg_collection must be ProcessGroups, or have groups of torch.distributed as "
            f"attributes tp and pp, got {pg_collection!r:.80}"
        )
        raise InvalidConfig(message, field="pg_collection")
    if distributed.get_rank(tensor) < 0:
        message = "this process is no rank of the group tp of pg_collection"
        raise InvalidConfig(message, field="pg_collection")
    if isinstance(stages, distributed.ProcessGroup) and distributed.get_world_size(stages) > 1:
        whole = getattr(pg_collection, "mp", None)
        whole = whole if isinstance(whole, distributed.ProcessGroup) else distributed.group.WORLD
        assert whole is not None  # there are groups, so there is a world
        groups = ProcessGroups.of_groups(tensor, stages, whole)
        if distributed.get_world_size(whole) == groups.size:
            # In groups of another order some ranks have their places, and are to be refused too.
            is_in_place = distributed.get_rank(whole) == groups.rank
            if all(AllRanks(groups).all_of(is_in_place)):
                return groups
        message = (
            f"the group mp of pg_collection, or the world without one, must have the {groups.size} "
            "processes of tp x pp, those of a stage next to each other"
        )
        raise InvalidConfig(message, field="pg_collection")
    return SINGLE if distributed.get_world_size(tensor) == 1 else ProcessGroups.of_tensor(tensor)
