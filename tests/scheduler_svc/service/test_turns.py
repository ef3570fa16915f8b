"""Threads on which the core loop turns, and events that must cause a turn."""

from __future__ import annotations

import queue
import select
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from scheduler_svc.service import loop as loop_module
from tests.scheduler_svc.service.fakes.arithmetic_runner import GEOMETRY, expected_outputs
from tests.scheduler_svc.service.service_bench import DEADLINE_S, ServiceBench

PROMPT = [5, 6, 7, 8, 9]


def is_woken(bench: ServiceBench) -> bool:
    """Return if the core thread would leave its poll at once."""
    return bool(select.select([bench.wakeup], [], [], 0)[0])


def take_turn(bench: ServiceBench) -> None:
    """Take one turn on a thread of its own, and let frontends read its messages."""
    thread = threading.Thread(target=bench.loop.turns.turn_now)
    with bench.in_step():
        thread.start()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


class LateCommands(queue.SimpleQueue):
    """Queue of commands to which another thread adds one just after it was found empty."""

    def __init__(self, add: Callable[[], None]) -> None:
        self._add: Callable[[], None] | None = add

    def empty(self) -> bool:
        was_empty = super().empty()
        add, self._add = self._add, None
        if add is not None:
            add()
        return was_empty


class TestTurnNow:
    def test_any_thread_makes_whole_turns(self, bench):
        """
        A request is taken, planned, computed and answered by turns of threads that never poll.
        """
        frontend = bench.frontend()
        frontend.submit(10, PROMPT, 6)
        turned_by = set()
        while 10 not in frontend.ended:
            take_turn(bench)
            turned_by.add(bench.loop.turns.made_by)
        assert expected_outputs(PROMPT, 6) == frontend.tokens[10]
        assert threading.get_ident() not in turned_by

    def test_turn_asked_for_during_another_follows_it_on_the_same_thread(self, bench):
        """
        A call for a turn in the middle of another waits for nothing and wakes no thread: the
        thread that makes the turn makes one more.
        """
        during_turn: list[int] = []

        def call(now: float) -> None:
            bench.wakeup.clear()
            bench.loop.turns.turn_now()
            during_turn.append(bench.loop.turns.count)

        bench.frontend()
        bench.loop._command(call)
        bench.loop.turns.poll_and_turn(0)
        assert [bench.loop.turns.count - 1] == during_turn
        assert not is_woken(bench)

    def test_turn_that_finds_something_due_sooner_wakes_the_core_thread(self, bench):
        """
        A turn that finds an earlier deadline wakes the core thread, which polls until the one it
        knew.
        """
        frontend = bench.frontend()
        bench.link.is_holding = True
        bench.turn()
        assert not is_woken(bench)
        frontend.submit(10, PROMPT, 6, deadline_s=bench.loop.turns.polls_until_s - 0.2)
        while not frontend.accepted:
            take_turn(bench)
        assert is_woken(bench)

    def test_error_of_any_turn_ends_the_core_thread(self, bench):
        """
        An error of a turn on another thread is raised where the loop runs, and no turn follows.
        """
        bench.frontend()

        def fail(now: float) -> None:
            raise ZeroDivisionError

        bench.loop._command(fail)
        bench.wakeup.clear()
        take_turn(bench)
        assert is_woken(bench)
        num_turns = bench.loop.turns.count
        take_turn(bench)
        with pytest.raises(ZeroDivisionError):
            bench.loop.turns.poll_and_turn(DEADLINE_S)
        assert num_turns == bench.loop.turns.count

    def test_loop_that_has_ended_turns_no_more(self, bench):
        """
        A result that comes after the loop's end causes no turn, since its resources are closed by
        then.
        """
        core = threading.Thread(target=bench.loop.run)
        core.start()
        bench.loop.stop(0.0)
        core.join(DEADLINE_S)
        assert not core.is_alive()
        num_turns = bench.loop.turns.count
        bench.loop.turns.turn_now()
        assert num_turns == bench.loop.turns.count


class TestRun:
    def test_results_are_taken_on_the_thread_that_reads_them(self, bench):
        """
        A running loop has the link call for a turn with every result.
        """
        core = threading.Thread(target=bench.loop.run)
        core.start()
        bench.loop.stop(0.0)
        core.join(DEADLINE_S)
        assert bench.link.turn == bench.loop.turns.turn_now


class TestTurnsForResults:
    def test_time_is_looked_at_after_an_interval(self, bench, monkeypatch):
        """
        Turns for results alone leave availability, queries and what else depends on the time to a
        later turn; a message from a frontend has them looked at again.
        """
        monkeypatch.setattr(loop_module, "LOOK_INTERVAL_S", 3600.0)
        num_looks = 0
        tell = bench.loop._availability.tell

        def count_and_tell() -> None:
            nonlocal num_looks
            num_looks += 1
            tell()

        frontend = bench.frontend()
        frontend.submit(10, PROMPT, 40)
        bench.until(lambda: 10 in frontend.tokens)
        monkeypatch.setattr(bench.loop._availability, "tell", count_and_tell)
        while len(frontend.tokens[10]) < 20:
            bench.turn()
        assert 0 == num_looks
        frontend.ask("stats")
        bench.turn()
        assert 1 == num_looks

    def test_command_that_comes_as_the_turn_looks_for_commands_is_told_by_its_turn(
        self, bench, monkeypatch
    ):
        """
        Frontends learn of a drain from the turn that begins it, also if a signal asks for it just
        as a turn for results looks for commands.
        """
        frontend = bench.frontend()
        frontend.submit(10, PROMPT, 40)
        bench.until(lambda: 10 in frontend.tokens)
        commands = LateCommands(lambda: bench.loop.stop(60.0))
        monkeypatch.setattr(bench.loop, "_commands", commands)
        bench.until(lambda: bench.loop._state.draining)
        assert frontend.availabilities[-1].draining

    def test_socket_is_asked_once_where_no_message_can_have_woken_the_thread(
        self, bench, monkeypatch
    ):
        """
        The thread that polls asks for messages before its turn and after it, any other only after.
        """
        num_asked = 0
        socket = type(bench.socket)

        def has_messages(self) -> bool:
            nonlocal num_asked
            num_asked += 1
            return bool(self._gathered)

        bench.frontend()
        bench.turn()
        monkeypatch.setattr(socket, "has_messages", property(has_messages))
        bench.loop.turns.turn_now()
        assert 1 == num_asked
        bench.loop.turns.poll_and_turn(0)
        assert 3 == num_asked

    def test_every_stage_has_its_steps_in_flight(self, make_bench):
        """An executor of several stages has `window` steps of each lane in flight, at all times."""
        bench = make_bench(window=2, run_ahead=2)
        bench.link.boot("boot-1", geometry=replace(GEOMETRY, num_stages=2))
        frontend = bench.frontend()
        for stream_id in (1, 2):
            frontend.submit(stream_id, PROMPT, 40)
        bench.until(lambda: min(len(frontend.tokens.get(n, ())) for n in (1, 2)) >= 3)
        bench.link.is_holding = True
        bench.until(lambda: len(bench.link._pending) == 4)
        pending = bench.link._pending
        later = [pending.pop() for _ in range(3)]
        bench.link.compute()
        pending.extend(reversed(later))
        bench.turn()
        assert 4 == len(bench.session._in_flight)
