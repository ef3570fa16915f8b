"""
Asking several addresses which executor is there, so that a silent one keeps nobody from the others.

Addresses are asked in order. The next one is asked when the one before has answered, or has not
answered for a moment; so who is preferred and quick is asked alone, and a node that vanished, whose
address swallows everything, costs that moment instead of the whole deadline.

Source: the staggered attempts of RFC 8305 (Happy Eyeballs), at the level of a call instead of a
connection: a stopped process accepts connections.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc

from scheduler_svc.executor_client.channel import open_channel, stub_on
from tandem.executor.v1 import executor_service_pb2 as executor_pb2
from tandem.executor.v1.executor_service_pb2_grpc import ExecutorServiceStub

HEAD_START_S = 0.5
"""How long an address is asked before the next one is asked too."""


@dataclass(frozen=True, slots=True)
class Answer:
    """
    What came of asking one address.

    Attributes:
        address: Which one.
        stub: For further calls there, until the probe is left.
        described: What it says of itself, or how the call failed.
    """

    address: str
    stub: ExecutorServiceStub
    described: executor_pb2.DescribeResponse | grpc.RpcError

    @property
    def boot_id(self) -> str:
        """Which boot of which executor answered; empty where the call failed."""
        return "" if isinstance(self.described, grpc.RpcError) else self.described.boot_id


class ExecutorProbe:
    """One round over addresses; leaving it ends all calls and connections. For one thread."""

    def __init__(self, addresses: Sequence[str], *, deadline_s: float) -> None:
        """
        Args:
            addresses: Whom to ask, preferred ones first.
            deadline_s: How long each may take to answer.
        """
        self._left = list(addresses)
        self._deadline_s = deadline_s
        self._num_due = 0
        self._done: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def answers(self) -> Iterator[Answer]:
        """One per address, in the order in which they come."""
        while self._num_due or self._left:
            if not self._num_due:
                self._ask_next()
            try:
                answer = self._done.get(timeout=HEAD_START_S if self._left else None)
            except queue.Empty:
                self._ask_next()
                continue
            self._num_due -= 1
            yield answer

    def first_answers(self) -> list[Answer]:
        """
        Ask all at once and wait for the first who answers well, and a moment more for others; in
        the order of the addresses.
        """
        order = list(self._left)
        while self._left:
            self._ask_next()
        came: list[Answer] = []
        until_s: float | None = None
        while self._num_due:
            left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            try:
                answer = self._done.get(timeout=left_s)
            except queue.Empty:
                break
            self._num_due -= 1
            came.append(answer)
            if until_s is None and answer.boot_id:
                until_s = time.monotonic() + HEAD_START_S
        return sorted(came, key=lambda answer: order.index(answer.address))

    def _ask_next(self) -> None:
        address = self._left.pop(0)
        stub = stub_on(self._open.enter_context(open_channel(address)))
        call = stub.Describe.future(executor_pb2.DescribeRequest(), timeout=self._deadline_s)
        self._open.callback(call.cancel)
        self._num_due += 1

        def note(done: Any) -> None:
            if done.cancelled():
                return  # nobody waits any more, and to ask such a call how it ended raises
            error = done.exception()
            self._done.put(Answer(address, stub, done.result() if error is None else error))

        call.add_done_callback(note)
