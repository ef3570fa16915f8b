"""The processes that share an engine's model: the ranks of a torch.distributed group."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from executor_svc.device.idle_threads import let_idle_threads_sleep
from tandem.errors import InvalidConfig
from tandem_embedded.parallel.sizes import ParallelSizes, check_ranks, check_stages

if TYPE_CHECKING:
    from executor_svc.parallel.process_groups import ProcessGroups


def process_groups(sizes: ParallelSizes, pg_collection: object) -> ProcessGroups | None:
    """
    Return the ranks that share the model, in a group of their own; None where this process has all
    of it. All ranks call it together.

    Args:
        sizes: Sizes as given.
        pg_collection: `ProcessGroups`, or an object with Megatron's attributes `tp` and `pp`, which
            are groups of torch.distributed. None takes the whole world if `sizes` ask for ranks.

    Raises:
        InvalidConfig: There is no such group, or it has another size.
    """
    if pg_collection is None and sizes.tensor in (None, 1):
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
    check_ranks(sizes, groups.tensor_size)
    return None if groups.tensor is None else groups


def _world(sizes: ParallelSizes) -> ProcessGroups:
    # These import PyTorch, as in `process_groups`.
    from torch import distributed  # noqa: PLC0415

    from executor_svc.parallel.process_groups import ProcessGroups  # noqa: PLC0415  # PyTorch

    if not (distributed.is_available() and distributed.is_initialized()):
        message = (
            f"tensor_model_parallel_size {sizes.tensor} takes as many processes: start them with "
            f"torchrun --nproc-per-node {sizes.tensor}, and call "
            "torch.distributed.init_process_group() before the engine is made"
        )
        raise InvalidConfig(message, field="tensor_model_parallel_size")
    check_ranks(sizes, distributed.get_world_size())
    # The world stays the caller's: functions of PyTorch keep it alive after it was destroyed.
    group = distributed.new_group()
    assert isinstance(group, distributed.ProcessGroup)
    return ProcessGroups.of_tensor(group)


def _collected(pg_collection: object) -> ProcessGroups:
    # These import PyTorch, as in `process_groups`.
    from torch import distributed  # noqa: PLC0415

    from executor_svc.parallel.process_groups import SINGLE, ProcessGroups  # noqa: PLC0415  # PyTorch

    tensor, stages = getattr(pg_collection, "tp", None), getattr(pg_collection, "pp", None)
    if not isinstance(tensor, distributed.ProcessGroup):
        message = (
            "pg_collection must be ProcessGroups, or have groups of torch.distributed as "
            f"attributes tp and pp, got {pg_collection!r:.80}"
        )
        raise InvalidConfig(message, field="pg_collection")
    if isinstance(stages, distributed.ProcessGroup):
        check_stages(distributed.get_world_size(stages))
    if distributed.get_rank(tensor) < 0:
        message = "this process is no rank of the group tp of pg_collection"
        raise InvalidConfig(message, field="pg_collection")
    return SINGLE if distributed.get_world_size(tensor) == 1 else ProcessGroups.of_tensor(tensor)
