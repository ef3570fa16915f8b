"""A core loop with a fake executor and fake frontends on real sockets, stepped by the test."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from scheduler_svc.config import LoadedSettings, SchedulerSettings
from scheduler_svc.core.request import FinishReason
from scheduler_svc.executor_connection import ExecutorConnector
from scheduler_svc.executor_link import ExecutorLink
from scheduler_svc.ipc.messages import (
    Accepted,
    Availability,
    EndStream,
    FrontendMessage,
    Hello,
    Model,
    Query,
    Refused,
    Reply,
    StreamEnd,
    StreamProgress,
    Submit,
    Update,
)
from scheduler_svc.ipc.sockets import CoreSocket, FrontendSocket
from scheduler_svc.loop import CoreLoop
from scheduler_svc.model_cache import ModelCache
from scheduler_svc.wakeup import Wakeup
from tandem.link.session import SchedulerId
from tests.scheduler_svc.loop.fake_link import FakeLink
from tests.scheduler_svc.loop.token_rows import token_rows

DEADLINE_S = 60.0


class FakeFrontend:
    """Collects what the core says, checking that no token is lost, repeated or out of order."""

    def __init__(self, path: Path, index: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._socket = FrontendSocket(path, index)
        self._clock = clock
        self.index = index
        self.accepted: set[int] = set()
        self.refused: dict[int, Refused] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, StreamEnd] = {}
        self.failed: dict[int, Refused] = {}
        self.progress: list[StreamProgress] = []
        self.replies: dict[int, Reply] = {}
        self.models: list[Model] = []
        self.availabilities: list[Availability] = []
        self.num_updates = 0
        self._num_choices: dict[int, int] = {}
        self._query_ids = itertools.count(1)
        self.send(Hello(index, 1000 + index))

    def send(self, message: FrontendMessage) -> None:
        self._socket.send(message)

    def submit(
        self,
        stream_id: int,
        prompt: list[int],
        max_tokens: int,
        raw_prompt: bytes | None = None,
        **changes,
    ) -> None:
        fields = {
            "stream_id": stream_id,
            "request_id": f"{self.index}-{stream_id}",
            "prompt": np.array(prompt, "<i4").tobytes() if raw_prompt is None else raw_prompt,
            "temperature": 0.0,
            "top_k": 0,
            "top_p": 1.0,
            "seed": 0,
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

    def read(self) -> bool:
        """Take one message, if one is here."""
        message = self._socket.receive(0.0)
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
    Attributes:
        clock: What time it is for the service and its frontends. With a fake executor it stands
            still, so that only as much time passes as the test says, however slow the machine is.
        lead_s: Added to the clock, so that a test can let time pass.
    """

    def __init__(self, tmp_path: Path, *, has_real_link: bool = False, **settings) -> None:
        self.path = tmp_path / "i" / "core.sock"
        self.lead_s = 0.0
        began_s = time.monotonic()
        now = time.monotonic if has_real_link else lambda: began_s
        self.clock = lambda: now() + self.lead_s
        self.socket = CoreSocket(self.path)
        self.wakeup = Wakeup()
        self.hellos: list[Hello] = []
        loaded = LoadedSettings(
            settings=SchedulerSettings(**settings), sources=dict.fromkeys(settings, "flag")
        )
        self.link = FakeLink()
        connector = ExecutorConnector(
            loaded.settings.executor_addresses,
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
            self.real_link if has_real_link else self.link,
            self.wakeup,
            clock=self.clock,
            on_hello=self.hellos.append,
            is_strict=True,
        )
        self.frontends: list[FakeFrontend] = []
        if has_real_link:
            self.real_link.start()
            self.real_link.connect()
        else:
            self.link.connect()

    def frontend(self, index: int = 0) -> FakeFrontend:
        """Connect a frontend and wait until the core knows it."""
        frontend = FakeFrontend(self.path, index, self.clock)
        self.frontends.append(frontend)
        self.until(lambda: frontend.availabilities)
        return frontend

    def turn(self) -> None:
        """One turn of the loop, then let frontends read."""
        self.loop.turn(0.002)
        for frontend in self.frontends:
            while frontend.read():
                pass

    def let_pass(self, seconds: float) -> None:
        """
        Let time pass as it does for a loop that turns every half second, until frontends have heard
        all that was said meanwhile: an answer comes after it.
        """
        for _ in range(round(seconds / 0.5)):
            self.lead_s += 0.5
            self.turn()
        for frontend in self.frontends:
            self.reply(frontend, "stats")

    def until(self, condition: Callable[[], object], *, turn_s: float = 0.0) -> None:
        """Turn until a condition holds, and let so much time pass with every turn."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, "the condition never held"
            self.lead_s += turn_s
            self.turn()

    def reply(self, frontend: FakeFrontend, kind: str, argument: bytes = b"{}") -> Reply:
        """Ask and wait for the answer."""
        query_id = frontend.ask(kind, argument)
        self.until(lambda: query_id in frontend.replies)
        return frontend.replies[query_id]

    def close(self) -> None:
        for frontend in self.frontends:
            frontend.close()
        if self.has_real_link:
            self.real_link.stop(release=False)
        self.socket.close()
        self.wakeup.close()
