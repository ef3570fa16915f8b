"""Processes that are ranks of a model, kept over all tests because each takes seconds to start."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from executor_svc.parallel.process_groups import ProcessGroups
from tests.piped_processes import PipedProcesses, answers, serve, tell

MOST_RANKS = 4
NUM_THREADS = 1
"""Threads of each rank, whatever the tests have: four ranks share the cores."""
STAGES = [(1, 2), (1, 3), (2, 2)]
"""Numbers of ranks of a stage and of stages."""
START_S, ANSWER_S = 120.0, 60.0
"""Times that are long on a busy machine; ranks that take longer wait for each other forever."""


class RankPool:
    """Four processes; a call takes the first of them."""

    def __init__(self, directory: Path) -> None:
        self._processes = PipedProcesses()
        store = directory / "store"
        self._pipes = [self._processes.start(_serve, rank, store) for rank in range(MOST_RANKS)]
        answers(self._pipes, START_S)

    def run(self, size: int, function: Callable[..., Any], *args: Any, **named: Any) -> list[Any]:
        """
        Call a function of a module with the groups of each of `size` ranks and more arguments; give
        the answers in the order of ranks.
        """
        return self.run_stages((size, 1), function, *args, **named)

    def run_stages(
        self, sizes: tuple[int, int], function: Callable[..., Any], *args: Any, **named: Any
    ) -> list[Any]:
        """As `run`, with so many ranks of each of so many stages, in the order of stages."""
        tensor_size, num_stages = sizes
        pipes = self._pipes[: tensor_size * num_stages]
        for pipe in pipes:
            pipe.send((sizes, function, args, named))
        return answers(pipes, ANSWER_S)

    def stop(self) -> None:
        """End the processes."""
        self._processes.stop()


@contextlib.contextmanager
def threads(num: int) -> Iterator[None]:
    """Let this process compute in so many threads, as the ranks of the pool do or otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _serve(pipe: Connection, rank: int, store: Path) -> None:
    torch.set_num_threads(NUM_THREADS)
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(str(store), MOST_RANKS),
        rank=rank,
        world_size=MOST_RANKS,
        timeout=timedelta(seconds=ANSWER_S),
    )
    sizes_alone = (1, 2, 3, MOST_RANKS)
    worlds = {size: distributed.new_group(list(range(size))) for size in sizes_alone}
    groups = {
        (size, 1): ProcessGroups.of_tensor(world) for size, world in worlds.items() if rank < size
    }
    for sizes in STAGES:
        groups[sizes] = ProcessGroups.of_stages(*sizes, timedelta(seconds=ANSWER_S))

    def answer(
        sizes: tuple[int, int],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Any:
        return function(groups[sizes], *args, **named)

    tell(pipe, None)  # the groups are there
    serve(pipe, answer)
