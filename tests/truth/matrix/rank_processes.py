"""
Processes that are ranks of executors, kept over many cases because each takes seconds to start.

A rank joins its executor's process groups, loads its share and computes the steps that it is sent,
as bytes of the step link, with the functions of the executor service.
"""

from __future__ import annotations

import gc
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import distributed

from executor_svc.config.settings import load_settings
from executor_svc.engine import load_engine
from executor_svc.ranks.joining import join_groups
from executor_svc.ranks.place import LOOPBACK, RankPlace
from executor_svc.server.loaded import Engine
from executor_svc.server.runner_thread import launch
from tandem.executor.v1.executor_service_pb2 import DescribeResponse
from tandem.link.codec.wire import decode_request, decode_response, encode_response
from tandem.link.commands import Step
from tandem.link.results import StepResult
from tests.piped_processes import PipedProcesses, answers, serve

ANSWER_S = 120.0
"""Seconds in which a rank answers on a busy machine; ranks wait for each other without a limit."""


class RankProcesses:
    """Processes without a task, and those that are ranks of executors; it starts what is needed."""

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: Folder for the files in which ranks meet.
        """
        self._folder = folder
        self._processes = PipedProcesses()
        self._idle: list[Connection] = []
        self._num_executors = 0

    def executor(self, tp_size: int, pp_size: int, flags: Sequence[str]) -> RankedExecutor:
        """Let so many ranks and stages begin to load an executor with these flags."""
        size = tp_size * pp_size
        while len(self._idle) < size:
            self._idle.append(self._processes.start(_serve))
        taken, self._idle = self._idle[:size], self._idle[size:]
        self._num_executors += 1
        store = self._folder / f"store-{self._num_executors}"
        return RankedExecutor(taken, self._idle.extend, (store, pp_size, tuple(flags)))

    def stop(self) -> None:
        """End all processes, whatever they do."""
        self._processes.stop()
        self._idle = []


class RankedExecutor:
    """The ranks of one executor, which all do what they are told, in order."""

    def __init__(
        self,
        ranks: list[Connection],
        give_back: Callable[[list[Connection]], None],
        loading: tuple[Path, int, tuple[str, ...]],
    ) -> None:
        """
        Args:
            ranks: Connections to idle processes, in the order of ranks.
            give_back: Takes them back.
            loading: File in which they meet, number of stages, and flags.
        """
        self._ranks = ranks
        self._give_back = give_back
        self._num_unanswered = 1
        for rank, pipe in enumerate(ranks):
            pipe.send(("load", (rank, len(ranks), *loading)))

    def describe(self) -> DescribeResponse:
        """Wait until all ranks have loaded, and return rank 0's description."""
        return DescribeResponse.FromString(self._ask("describe")[0])

    def send(self, raw: bytes) -> None:
        """Let all ranks launch a step, given in bytes of the step link."""
        self._tell("launch", raw)

    def collect(self) -> StepResult:
        """Return rank 0's result of the oldest step; all ranks must have the same tokens."""
        results = [decode_response(raw) for raw in self._ask("collect")]
        tokens = [(one.step_id, one.slot.tolist(), one.token.tolist()) for one in results]
        assert [tokens[0]] * len(tokens) == tokens
        return results[0]

    def end(self) -> None:
        """Check that all ranks have the same on their devices, and give them back."""
        checksums = self._ask("checksum")
        assert 1 == len(set(checksums)), checksums
        self._ask("compare_ranks")
        self._ask("end")
        self._give_back(self._ranks)

    def _tell(self, name: str, *given: object) -> None:
        self._num_unanswered += 1
        for pipe in self._ranks:
            pipe.send((name, given))

    def _ask(self, name: str, *given: object) -> list[Any]:
        """Return the answers of all ranks; what they were told before must have gone well."""
        self._tell(name, *given)
        num_each, self._num_unanswered = self._num_unanswered, 0
        return answers(self._ranks, ANSWER_S, num_each=num_each)


class _Rank:
    """One rank; its methods are called by name, with what the test sends."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._launched: deque[Callable[[], StepResult]] = deque()

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    def load(self, rank: int, size: int, store: Path, pp_size: int, flags: Sequence[str]) -> None:
        """Join the other ranks, and load a share of the model together with them."""
        place = RankPlace(
            rank=rank,
            size=size,
            pp_size=pp_size,
            local_rank=rank,
            host=LOOPBACK,
            port=0,
            parent=os.getppid(),
        )
        groups = join_groups(place, distributed.FileStore(str(store), size), "cpu")
        self._engine = load_engine(load_settings(flags, {}), "boot", groups=groups)

    def describe(self) -> bytes:
        return self.engine.description.SerializeToString()

    def launch(self, raw: bytes) -> None:
        """Launch a step, checking its state hash, as every rank of an executor does."""
        step = decode_request(raw)
        assert isinstance(step, Step)
        self._launched.append(launch(self.engine.runner, step))

    def collect(self) -> bytes:
        return encode_response(self._launched.popleft()())

    def checksum(self) -> int:
        return self.engine.checksum()

    def compare_ranks(self) -> None:
        self.engine.compare_ranks()

    def end(self) -> None:
        """Forget the model, and leave the groups."""
        assert not self._launched
        self._engine = None
        gc.collect()  # a link of stages waits for its transfers first
        distributed.destroy_process_group()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    rank = _Rank()
    serve(pipe, lambda name, given: getattr(rank, name)(*given))
