"""
Describe calls to several addresses, in which a silent address does not hold up the others.

Addresses are asked in order. The next one is asked when all before it have answered, or after
`HEAD_START_S` without an answer. A preferred executor that answers quickly is so the only one that
is asked, and a node that vanished without closing its connections costs that time instead of the
whole deadline.

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

from scheduler_svc.executor_client.channel import ExecutorAccess, stub_on
from tandem.executor.v1 import executor_service_pb2 as executor_pb2
from tandem.executor.v1.executor_service_pb2_grpc import ExecutorServiceStub

HEAD_START_S = 0.5
"""Seconds without an answer after which the next address is asked too."""


@dataclass(frozen=True, slots=True)
class Answer:
    """
    Result of a Describe call to one address.

    Attributes:
        address: The address.
        stub: Stub for further calls to it, until the probe is left.
        described: The executor's answer, or the error of the call.
    """

    address: str
    stub: ExecutorServiceStub
    described: executor_pb2.DescribeResponse | grpc.RpcError

    @property
    def boot_id(self) -> str:
        """Boot id of the executor that answered; empty if the call failed."""
        return "" if isinstance(self.described, grpc.RpcError) else self.described.boot_id


class ExecutorProbe:
    """One round of calls to addresses; leaving it ends calls and connections. For one thread."""

    def __init__(
        self, addresses: Sequence[str], *, deadline_s: float, access: ExecutorAccess | None = None
    ) -> None:
        """
        Args:
            addresses: Addresses to ask, preferred ones first.
            deadline_s: Seconds that each may take to answer.
            access: Way to executors; None for plain text and no token.
        """
        self._access = ExecutorAccess() if access is None else access
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
        """Yield one answer per address, in the order in which they come."""
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
        Ask all addresses at the same time, and return the answers in the order of the addresses.

        Waits for the first successful answer and `HEAD_START_S` more for others; if there is none,
        until all calls have ended.
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
        stub = stub_on(self._open.enter_context(self._access.open(address)))
        call = stub.Describe.future(
            executor_pb2.DescribeRequest(),
            timeout=self._deadline_s,
            metadata=self._access.metadata(),
        )
        self._open.callback(call.cancel)
        self._num_due += 1

        def note(done: Any) -> None:
            if done.cancelled():
                return  # the probe was left, and `exception` of a cancelled call raises
            error = done.exception()
            self._done.put(Answer(address, stub, done.result() if error is None else error))

        call.add_done_callback(note)
