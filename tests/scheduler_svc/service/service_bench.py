"""A core loop with a fake executor and fake frontends on real sockets, stepped by the test."""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from scheduler_svc.config.settings import LoadedSettings, SchedulerSettings
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.executor_client.connection import ExecutorConnector
from scheduler_svc.executor_client.link import ExecutorLink
from scheduler_svc.executor_client.model_cache import ModelCache
from scheduler_svc.executor_client.session import ExecutorSession
from scheduler_svc.ipc.messages import (
    Accepted,
    Availability,
    CoreMessage,
    EndStream,
    FrontendMessage,
    Hello,
    Model,
    Query,
    Refused,
    Reply,
    StepSpan,
    StreamEnd,
    StreamProgress,
    Submit,
    Update,
)
from scheduler_svc.ipc.sockets import CoreSocket
from scheduler_svc.service.loop import CoreLoop
from scheduler_svc.service.wakeup import Wakeup
from tandem.link.session import SchedulerId
from tandem.sampling_params import SamplingParams
from tests.scheduler_svc.ipc.frontend_socket import FrontendSocket
from tests.scheduler_svc.service.fakes.fake_link import FakeLink
from tests.scheduler_svc.service.token_rows import token_rows

DEADLINE_S = 60.0


class LockstepSocket(CoreSocket):
    """
    The core's end of real sockets. It gives the core only the messages gathered for its turn, since
    zmq carries messages on threads of its own, which may be late.

    Attributes:
        num_gathered: Number of messages of all frontends that came.
        num_sent: Number of messages that the pipe of each frontend took.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.num_gathered = 0
        self.num_sent: Counter[int] = Counter()
        self._gathered: deque[tuple[int, FrontendMessage] | msgspec.DecodeError] = deque()

    def gather(self, num_messages: int) -> None:
        """Wait until so many messages have come since the start."""
        while self.num_gathered < num_messages:
            assert self._socket.poll(int(DEADLINE_S * 1000)), "a message never came"
            try:
                self._gathered.extend(super().receive(1))
            except msgspec.DecodeError as error:
                self._gathered.append(error)
            self.num_gathered += 1

    @property
    def has_messages(self) -> bool:
        return bool(self._gathered)

    def receive(self, at_most: int) -> Iterator[tuple[int, FrontendMessage]]:
        for _ in range(min(at_most, len(self._gathered))):
            message = self._gathered.popleft()
            if isinstance(message, msgspec.DecodeError):
                raise message
            yield message

    def try_send(self, index: int, message: CoreMessage) -> bool:
        is_sent = super().try_send(index, message)
        self.num_sent[index] += is_sent
        return is_sent


class FakeFrontend:
    """
    Frontend that collects the core's messages and checks that no token is lost, repeated or out of
    order.

    Attributes:
        num_sent: Number of messages sent to the core.
        num_read: Number of messages of the core that were read.
    """

    def __init__(self, path: Path, index: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._socket = FrontendSocket(path, index)
        self._clock = clock
        self.index = index
        self.num_sent = self.num_read = 0
        self.accepted: set[int] = set()
        self.refused: dict[int, Refused] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, StreamEnd] = {}
        self.failed: dict[int, Refused] = {}
        self.progress: list[StreamProgress] = []
        self.replies: dict[int, Reply] = {}
        self.models: list[Model] = []
        self.availabilities: list[Availability] = []
        self.steps: list[StepSpan] = []
        self.num_updates = 0
        self._num_choices: dict[int, int] = {}
        self._query_ids = itertools.count(1)
        self.send(Hello(index, 1000 + index))

    def send(self, message: FrontendMessage) -> None:
        self._socket.send(message)
        self.num_sent += 1

    def send_frame(self, frame: bytes) -> None:
        """Send a frame that need not be a message."""
        self._socket._socket.send(frame)
        self.num_sent += 1

    def submit(
        self,
        stream_id: int,
        prompt: list[int],
        max_tokens: int,
        raw_prompt: bytes | None = None,
        **changes,
    ) -> None:
        names = {param.name for param in dataclass_fields(SamplingParams)}
        sampling = {name: changes.pop(name) for name in names & changes.keys()}
        fields = {
            "stream_id": stream_id,
            "request_id": f"{self.index}-{stream_id}",
            "prompt": np.array(prompt, "<i4").tobytes() if raw_prompt is None else raw_prompt,
            "sampling": replace(SamplingParams(temperature=0.0, top_p=1.0), **sampling),
            "max_tokens": max_tokens,
            "eos_token_ids": (),
            "stop_token_ids": (),
            "arrival_s": self._clock(),
            "deadline_s": None,
        }
        submit = Submit(**(fields | changes))
        self._num_choices[stream_id] = submit.num_choices
        self.send(submit)

    def end(self, stream_id: int, reason=FinishReason.CANCELLED, num_output_tokens=None) -> None:
        self.send(
            EndStream(stream_id=stream_id, reason=int(reason), num_output_tokens=num_output_tokens)
        )

    def ask(self, kind: str, argument: bytes = b"{}") -> int:
        query_id = next(self._query_ids)
        self.send(Query(query_id=query_id, kind=kind, argument=argument))
        return query_id

    def read(self, timeout_s: float = 0.0) -> bool:
        """Take one message, if one comes in time; return if it did."""
        message = self._socket.receive(timeout_s)
        self.num_read += message is not None
        match message:
            case None:
                return False
            case Accepted():
                first = message.stream_id
                self.accepted.update(range(first, first + self._num_choices[first]))
            case Refused():
                self.refused[message.stream_id] = message
            case Reply():
                self.replies[message.query_id] = message
            case Model():
                self.models.append(message)
            case Availability():
                self.availabilities.append(message)
            case StepSpan():
                self.steps.append(message)
            case Update():
                self._update(message)
        return True

    def close(self) -> None:
        self._socket.close()

    def _update(self, update: Update) -> None:
        self.num_updates += 1
        for stream_id, offset, token in token_rows(update):
            tokens = self.tokens.setdefault(stream_id, [])
            assert stream_id in self.accepted
            assert len(tokens) == offset
            tokens.append(token)
        for end in update.ended:
            assert end.stream_id not in self.ended
            self.ended[end.stream_id] = end
        for failure in update.failed:
            assert failure.stream_id not in self.failed
            self.failed[failure.stream_id] = failure
        self.progress.extend(update.progress)


class ServiceBench:
    """
    A core loop that turns in step with its frontends: messages that they sent before a turn are
    there for it, and its messages are read when it is over, however late zmq's threads are.

    Attributes:
        links: A fake link for each executor that serves, by its address.
        link: The first of them.
        frontends: Frontends that read the core's messages.
        clock: Clock of the service and its frontends. With a fake executor it stands still, so that
            only as much time passes as the test says, however slow the machine is.
        lead_s: Seconds added to the clock, so that a test can let time pass.
    """

    def __init__(self, tmp_path: Path, *, has_real_link: bool = False, **settings) -> None:
        self.path = tmp_path / "i" / "core.sock"
        self.lead_s = 0.0
        began_s = time.monotonic()
        now = time.monotonic if has_real_link else lambda: began_s
        self.clock = lambda: now() + self.lead_s
        self.socket = LockstepSocket(self.path)
        self.wakeup = Wakeup()
        self.hellos: list[Hello] = []
        loaded = LoadedSettings(
            settings=SchedulerSettings(**settings), sources=dict.fromkeys(settings, "flag")
        )
        addresses = loaded.settings.executor_addresses
        self.links = {address: FakeLink() for address in addresses}
        self.link = self.links[addresses[0]]
        connector = ExecutorConnector(
            loaded.settings.link_addresses,
            scheduler=SchedulerId(name="scheduler-1", incarnation="1"),
            lease_ms=loaded.settings.lease_ms,
            take_over=loaded.settings.take_over,
            cache=ModelCache(tmp_path / "models"),
            accept=lambda description: loaded.limits_on(description.geometry),
        )
        self.real_link = ExecutorLink(connector, wake=self.wakeup.set)
        self.has_real_link = has_real_link
        self.loop = CoreLoop(
            loaded,
            self.socket,
            lambda address: self.real_link if has_real_link else self.links[address],
            self.wakeup,
            clock=self.clock,
            on_hello=self.hellos.append,
            is_strict=True,
        )
        self.frontends: list[FakeFrontend] = []
        self._speakers: list[FakeFrontend] = []
        """All frontends that were ever connected, those that were dropped included."""
        if has_real_link:
            self.real_link.start()
            self.real_link.connect()
        else:
            for link in self.links.values():
                link.connect()

    @property
    def session(self) -> ExecutorSession:
        """The session with the only executor that serves."""
        (member,) = self.loop._members
        return member.session

    def frontend(self, index: int = 0) -> FakeFrontend:
        """Connect a frontend and wait until the core knows it."""
        frontend = self.late_frontend(index)
        self.turn()
        assert frontend.availabilities
        return frontend

    def late_frontend(self, index: int = 0) -> FakeFrontend:
        """Connect a frontend, of which the next turn learns."""
        assert all(index != other.index for other in self.frontends)
        self.socket.num_sent[index] = 0
        frontend = FakeFrontend(self.path, index, self.clock)
        self.frontends.append(frontend)
        self._speakers.append(frontend)
        return frontend

    def drop(self, frontend: FakeFrontend) -> None:
        """Close a frontend, as if its process died after its last message was sent."""
        self._gather()
        self.frontends.remove(frontend)
        frontend.close()

    def turn(self) -> None:
        """Make one turn of the loop; wait a moment for messages only if the executor is real."""
        with self.in_step():
            is_waiting = self.has_real_link and not self.socket.has_messages
            self.loop.turns.poll_and_turn(0.002 if is_waiting else 0.0)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """
        Make a turn inside: the core gets messages that frontends sent before, and they read its
        own.
        """
        self._gather()
        yield
        for frontend in self.frontends:
            while frontend.num_read < self.socket.num_sent[frontend.index]:
                assert frontend.read(DEADLINE_S), "what the core sent never came"

    def _gather(self) -> None:
        self.socket.gather(sum(frontend.num_sent for frontend in self._speakers))

    def let_pass(self, seconds: float) -> None:
        """Let time pass as it does for a loop that turns every half second."""
        for _ in range(round(seconds / 0.5)):
            self.lead_s += 0.5
            self.turn()

    def until(self, condition: Callable[[], object], *, turn_s: float = 0.0) -> None:
        """Turn until a condition holds; let so much time pass before every turn."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, "the condition never held"
            self.lead_s += turn_s
            self.turn()

    def reply(self, frontend: FakeFrontend, kind: str, argument: bytes = b"{}") -> Reply:
        """Send a query and return its answer."""
        query_id = frontend.ask(kind, argument)
        self.until(lambda: query_id in frontend.replies)
        return frontend.replies[query_id]

    def close(self) -> None:
        for frontend in self.frontends:
            frontend.close()
        if self.has_real_link:
            self.real_link.stop(release=False)
        self.loop.turns.end()  # also on the link's thread, should that be late
        self.socket.close()
        self.wakeup.close()
