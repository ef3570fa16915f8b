"""Queries about the whole service, which frontends send for operators and for themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from scheduler_svc.config.settings import LoadedSettings
from scheduler_svc.ipc.messages import Query, Reply
from scheduler_svc.ipc.snapshot import ExecutorList, Noted, encode_json
from scheduler_svc.service.observe.readings import Readings
from scheduler_svc.service.operate.commands import Commands
from scheduler_svc.service.operate.pending import Pending
from scheduler_svc.service.publisher import Publisher, refusal
from scheduler_svc.service.service_state import ServiceState
from tandem.admin.v1.stats_pb2 import GetStatsResponse as Stats
from tandem.errors import InternalError, TandemError

_Answer: TypeAlias = Callable[[bytes, float], msgspec.Struct | Stats]
"""Maker of an answer from the query's argument and the time."""


class Queries:
    """
    Answers to queries; see `ipc.snapshot` for their kinds, arguments and results. Owned by the core
    loop.
    """

    def __init__(
        self,
        loaded: LoadedSettings,
        state: ServiceState,
        publisher: Publisher,
        readings: Readings,
        commands: Commands,
    ) -> None:
        self._state = state
        self._publisher = publisher
        self._waiting: list[tuple[int, int, Pending]] = []
        """Number of the frontend and id of each query that is not answered yet, and its answer."""
        self._readings = readings
        self._commands = commands
        self._answers: dict[str, _Answer] = {
            "stats": lambda _, now: readings.stats(now),
            "metrics": lambda _, now: readings.metrics(now),
            "demand": lambda _, now: readings.demand(now),
            "activity": readings.activity,
            "config": lambda _argument, _now: loaded.in_force(state.limits),
            "requests": readings.requests,
            "events": readings.events,
            "executor": lambda _argument, _now: readings.executor(),
            "executors": lambda _, now: readings.executors(now),
            "report": readings.note_report,
            "unserved": self._note_unserved,
            "abort": commands.abort,
            "flush": commands.flush,
            "add_executor": self._add_executor,
            "remove_executor": self._remove_executor,
        }
        self._deferred: dict[str, Callable[[bytes, float], Pending]] = {
            "drain": commands.drain,
            "drain_executor": commands.drain_executor,
            "suspend": commands.suspend,
            "resume": commands.resume,
        }

    @property
    def next_answer_s(self) -> float | None:
        """Earliest time by which a waiting query must be answered; None without any."""
        return min((pending.until_s for _, _, pending in self._waiting), default=None)

    def answer(self, frontend: int, query: Query, now: float) -> Reply | None:
        """Return the answer, or None when `settle` will answer."""
        try:
            if query.kind in self._deferred:
                pending = self._deferred[query.kind](query.argument, now)
                self._waiting.append((frontend, query.query_id, pending))
                return None
            answer = self._answers.get(query.kind)
            if answer is None:
                raise InternalError(f"unknown query {query.kind!r}")
            return _reply(query.query_id, answer(query.argument, now))
        except TandemError as error:
            return Reply(query_id=query.query_id, result=b"", error=refusal(0, error))
        except msgspec.DecodeError as error:
            wrong = InternalError(f"argument of query {query.kind!r}: {error}")
            return Reply(query_id=query.query_id, result=b"", error=refusal(0, wrong))

    def settle(self, now: float) -> None:
        """Answer every waiting query that is done or out of time."""
        due = [one for one in self._waiting if one[2].is_done() or one[2].until_s <= now]
        for one in due:
            self._waiting.remove(one)
            frontend, query_id, pending = one
            try:
                reply = _reply(query_id, pending.result())
            except TandemError as error:
                reply = Reply(query_id=query_id, result=b"", error=refusal(0, error))
            self._publisher.answer(frontend, reply)

    def _note_unserved(self, _argument: bytes, now: float) -> Noted:
        self._state.unserved_s = now
        return Noted()

    def _add_executor(self, argument: bytes, now: float) -> ExecutorList:
        self._commands.add_executor(argument, now)
        return self._readings.executors(now)

    def _remove_executor(self, argument: bytes, now: float) -> ExecutorList:
        self._commands.remove_executor(argument, now)
        return self._readings.executors(now)


def _reply(query_id: int, result: msgspec.Struct | Stats) -> Reply:
    return Reply(query_id=query_id, result=encode_json(result), error=None)
