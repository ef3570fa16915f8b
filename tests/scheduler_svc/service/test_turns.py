"""Threads on which the core loop turns, and events that must cause a turn."""

from __future__ import annotations

import queue
import select
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from scheduler_svc.service.housekeeping import LOOK_INTERVAL_S
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


def turn_for_results(bench: ServiceBench, num_turns: int) -> None:
    """Take turns, each of which has a token for the request that decodes."""
    (tokens,) = bench.frontends[0].tokens.values()
    for _ in range(num_turns):
        num_tokens = len(tokens)
        bench.turn()
        assert len(tokens) > num_tokens


def drain_executor(bench: ServiceBench, grace_s: float) -> None:
    """Have the next turn begin to drain the executor."""
    (member,) = bench.loop._members
    bench.loop._command(
        lambda now: bench.loop._operations.begin_drain(member.address, grace_s, now)
    )


@pytest.fixture
def decoding(bench) -> ServiceBench:
    """Return a service with one request, which decodes."""
    frontend = bench.frontend()
    frontend.submit(10, PROMPT, 40)
    bench.until(lambda: 10 in frontend.tokens)
    return bench


@pytest.fixture
def housekeeping(decoding, monkeypatch) -> list[float]:
    """Return the times at which the service did its housekeeping from now on."""
    times: list[float] = []
    tell = decoding.loop._availability.tell

    def note_and_tell() -> None:
        times.append(decoding.clock())
        tell()

    monkeypatch.setattr(decoding.loop._availability, "tell", note_and_tell)
    return times


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
    def test_housekeeping_rests(self, decoding, housekeeping):
        """
        Turns for results alone do no housekeeping: availability, queries and what else depends on
        the time.
        """
        turn_for_results(decoding, 5)
        assert [] == housekeeping

    def test_housekeeping_is_done_after_an_interval(self, decoding, housekeeping):
        """
        The first turn after `LOOK_INTERVAL_S` does the housekeeping, though it is for a result.
        """
        decoding.lead_s += LOOK_INTERVAL_S
        turn_for_results(decoding, 3)
        assert [decoding.clock()] == housekeeping

    def test_message_has_the_housekeeping_done(self, decoding, housekeeping):
        """
        The turn that takes a frontend's message does the housekeeping.
        """
        decoding.frontends[0].ask("stats")
        decoding.turn()
        assert 1 == len(housekeeping)

    def test_last_end_has_the_housekeeping_done(self, decoding, housekeeping):
        """
        The turn in which the last request ends does the housekeeping.
        """
        frontend = decoding.frontends[0]
        decoding.until(lambda: frontend.ended)
        assert 1 == len(housekeeping)

    @pytest.mark.parametrize(
        "begin",
        [
            pytest.param(lambda bench: bench.loop.stop(60.0), id="drain"),
            pytest.param(lambda bench: drain_executor(bench, 60.0), id="executor-to-give-back"),
        ],
    )
    def test_housekeeping_does_not_rest_during_a_drain(self, decoding, housekeeping, begin):
        """
        While the service or an executor drains, every turn does the housekeeping: any result may be
        the last one that it waits for.
        """
        begin(decoding)
        decoding.turn()
        num_before = len(housekeeping)
        turn_for_results(decoding, 5)
        assert num_before + 5 == len(housekeeping)

    def test_result_that_a_query_waits_for_has_it_answered(self, decoding):
        """
        The turn that takes the result of a resumption answers the query that asked for it.
        """
        frontend = decoding.frontends[0]
        decoding.reply(frontend, "suspend", b'{"kv_mode": 1}')
        decoding.link.is_holding = True
        resume = frontend.ask("resume")
        decoding.turn()
        assert frontend.availabilities[-1].ready
        assert resume not in frontend.replies
        decoding.link.compute()
        decoding.turn()
        assert resume in frontend.replies

    def test_result_that_makes_the_service_ready_has_it_told(self, decoding):
        """
        The turn that takes the result of a step that was late tells that the service is ready.
        """
        frontend = decoding.frontends[0]
        decoding.link.is_holding = True
        decoding.turn()
        decoding.link.beat(elapsed_ms=20_000)
        decoding.turn()
        assert not frontend.availabilities[-1].ready
        decoding.link.compute()
        decoding.turn()
        assert frontend.availabilities[-1].ready

    @pytest.mark.parametrize(
        "begin",
        [
            pytest.param(lambda bench: bench.loop.stop(0.2), id="drain"),
            pytest.param(lambda bench: drain_executor(bench, 0.2), id="executor-to-give-back"),
        ],
    )
    def test_grace_time_of_a_drain_ends_on_time(self, decoding, begin):
        """
        The core thread polls no longer than to the end of the grace time of a drain.
        """
        decoding.link.is_holding = True
        begin(decoding)
        decoding.turn()
        assert pytest.approx(0.2) == decoding.loop.turns.polls_until_s - decoding.clock()

    def test_command_that_comes_as_the_turn_looks_for_commands_is_told_by_its_turn(
        self, decoding, monkeypatch
    ):
        """
        Frontends learn of a drain from the turn that begins it, also if a signal asks for it just
        as a turn for results looks for commands.
        """
        commands = LateCommands(lambda: decoding.loop.stop(60.0))
        monkeypatch.setattr(decoding.loop, "_commands", commands)
        decoding.until(lambda: decoding.loop._state.draining)
        assert decoding.frontends[0].availabilities[-1].draining

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
