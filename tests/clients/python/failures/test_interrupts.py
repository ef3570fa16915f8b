"""Streams whose reader is interrupted with Ctrl-C, closes them, or lets go of them."""

from __future__ import annotations

import contextvars
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue

import pytest

from tandem.status import CallCancelled
from tandem_client import Client, Delta
from tandem_client.streams.interrupts import NUM_AHEAD, do_safely, read_safely
from tests.clients.python.fake_server import ANSWER, PATIENCE_S, Act
from tests.waiting import wait_until

PROGRAMS = "tests.clients.python.failures"
NUM_INTERRUPTS = 40
NUM_PROGRAMS = 4
"""Ends of a program, each a chance that Python's end meets a thread in the wrong moment."""


CLOSE_AT_EXIT = """
import atexit, sys
from tandem_client import Client
stream = Client(sys.argv[1]).generate("one")
atexit.register(lambda: (stream.close(), print("closed")))
"""
FORK = """
import os, queue, sys
from tandem_client.streams.interrupts import do_safely
do_safely(lambda: None)
child = os.fork()
done = queue.SimpleQueue()
do_safely(lambda: done.put(None))
done.get(timeout=60)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else 0)
"""
"""Does an action in a process that has done one before, and in its child."""


class Numbers:
    """A source that counts up, and knows the threads that have read it."""

    def __init__(self, last=10**9, error=None):
        self.num_read, self.threads, self.num_closed = 0, set(), 0
        self.has_ended = threading.Event()
        self._last, self._error = last, error

    def is_closed(self):
        return self.num_closed > 0

    def close(self):
        self.num_closed += 1

    def has_read(self, num):
        return self.num_read >= num

    def events(self):
        self.threads.add(threading.current_thread())
        try:
            while self.num_read < self._last:
                self.num_read += 1
                yield self.num_read
            if self._error is not None:
                raise self._error
        finally:
            self.has_ended.set()


@pytest.fixture(params=["main", "other"])
def in_thread(request):
    """Call a function in the main thread, then in another one."""
    if request.param == "main":
        yield lambda function: function()
    else:
        with ThreadPoolExecutor(1) as other:
            yield lambda function: other.submit(function).result(PATIENCE_S)


def output_of(program, server, *arguments):
    """Run a program of this folder against the server, and return its lines."""
    module = f"{PROGRAMS}.{program}"
    result = ended(["-m", module, server.address, *map(str, arguments)])
    return result.stdout.splitlines()


def ended(arguments):
    """Run Python to its end, which is a good one, and return the outcome."""
    return subprocess.run(
        [sys.executable, *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S + NUM_INTERRUPTS,
    )


class TestInterrupts:
    def test_client_answers_after_each_stream_interrupted_in_the_middle(self, server):
        """
        A stream may be interrupted while output comes, and the client's next call is answered.
        """
        server.play(*[Act(num_tokens=8, hang=True), Act()] * NUM_INTERRUPTS)
        answers = output_of("interrupted_streams", server, NUM_INTERRUPTS, "middle")

        assert [ANSWER] * NUM_INTERRUPTS == answers

    def test_client_answers_after_two_interrupts_at_any_moment_of_a_stream(self, server):
        """
        A stream may be interrupted while it begins or ends, and again right after that, and the
        client's next call is answered.
        """
        answers = output_of("interrupted_streams", server, 5 * NUM_INTERRUPTS, "start")

        assert [ANSWER] * 5 * NUM_INTERRUPTS == answers

    def test_program_that_broke_out_of_streams_ends(self, server):
        """
        A program that broke out of streams in its main thread ends without closing anything.
        """
        program = f"{PROGRAMS}.broken_off_streams"
        for _ in range(NUM_PROGRAMS):
            server.play(*[Act(hang=True)] * 4)
            result = ended(["-m", program, server.address, "4"])

            assert ([ANSWER[0]] * 4, "") == (result.stdout.splitlines(), result.stderr)

    def test_stream_can_be_closed_when_the_program_ends(self, server):
        """
        An atexit function may close a stream that was never read.
        """
        result = ended(["-c", CLOSE_AT_EXIT, server.address])

        assert ("closed\n", "") == (result.stdout, result.stderr)


class TestClose:
    def test_closed_stream_yields_no_more_events(self, server, in_thread):
        """
        After `close` a stream ends, though more events may have arrived.
        """

        def read():
            with Client(server.address) as client:
                stream = client.generate("one")
                events = [next(stream)]
                stream.close()
                return events + list(stream)

        assert 1 == len(in_thread(read))

    def test_closed_stream_has_no_result(self, server, in_thread):
        """
        `result` of a stream that was closed before its end raises CallCancelled.
        """

        def read():
            with Client(server.address) as client:
                stream = client.generate("one")
                next(event for event in stream if isinstance(event, Delta))
                stream.close()
                return stream.result()

        with pytest.raises(CallCancelled):
            in_thread(read)

    def test_stream_closed_by_another_thread_wakes_its_reader(self, server):
        """
        A main thread that waits for the next event goes on as soon as another closes the stream.
        """
        server.play(Act(num_tokens=8, hang=True))
        with Client(server.address) as client, ThreadPoolExecutor(1) as other:
            stream = client.generate("one")
            has_hung = other.submit(server.seen.hanging.wait, PATIENCE_S)
            closed = other.submit(stream.close)
            for _ in stream:
                pass

        assert has_hung.result()
        assert closed.result() is None


class TestReadSafely:
    def test_main_thread_leaves_reading_to_another(self):
        """
        In the main thread, where interrupts are raised, none of the source's own code runs.
        """
        source = Numbers(last=3)

        assert [1, 2, 3] == list(read_safely(source))
        assert threading.main_thread() not in source.threads

    def test_other_thread_reads_the_source_itself(self):
        """
        A thread that no interrupt can reach needs no second one.
        """
        source = Numbers(last=3)

        def read():
            return list(read_safely(source)), threading.current_thread()

        with ThreadPoolExecutor(1) as other:
            numbers, thread = other.submit(read).result()

        assert [1, 2, 3] == numbers
        assert {thread} == source.threads

    def test_reading_thread_has_the_context_of_the_one_that_asks(self):
        """
        Context variables, such as the trace that a call belongs to, have the asker's values.
        """
        trace = contextvars.ContextVar("trace", default="none")
        source = Numbers(last=1)
        source.events = lambda: iter_once(trace.get)
        trace.set("mine")

        assert ["mine"] == list(read_safely(source))

    @pytest.mark.parametrize("error", [ValueError("broken"), SystemExit("broken")])
    def test_failure_comes_after_what_was_read(self, error):
        """
        The source's failure, of whatever kind, is raised once all events before it were given out.
        """
        events = read_safely(Numbers(last=2, error=error))

        assert [1, 2] == [next(events), next(events)]
        with pytest.raises(type(error), match="broken"):
            next(events)

    def test_slow_reader_is_few_events_behind(self):
        """
        No more events are read ahead than NUM_AHEAD, so that a slow reader slows the server.
        """
        source = Numbers()
        events = read_safely(source)
        for num_read in range(NUM_AHEAD, NUM_AHEAD + 20):
            next(events)
            wait_until(partial(source.has_read, num_read), "read ahead")

            assert num_read == source.num_read

    def test_dropped_iterator_closes_its_source_and_ends_its_thread(self):
        """
        Freeing the iterator closes the source, and the thread that reads it ends.
        """
        source = Numbers()
        events = read_safely(source)
        next(events)

        assert not source.is_closed()
        del events

        assert source.is_closed()
        assert source.has_ended.wait(PATIENCE_S)


class TestDoSafely:
    def test_main_thread_leaves_an_action_to_another(self):
        """
        An action of the main thread is done, soon, by another one.
        """
        done_by = SimpleQueue()
        do_safely(lambda: done_by.put(threading.get_ident()))

        assert threading.get_ident() != done_by.get(timeout=PATIENCE_S)

    def test_failing_action_is_logged_and_hinders_no_other(self, caplog):
        """
        An action that raises is logged, and the next one is done.
        """
        done = SimpleQueue()
        do_safely(partial(int, "no number"))
        do_safely(partial(done.put, None))
        done.get(timeout=PATIENCE_S)

        assert "an action for the main thread failed" in caplog.text

    def test_forked_process_does_its_own_actions(self):
        """
        A child of a process that has left actions to a thread has a thread of its own.
        """
        ended(["-c", FORK])

    def test_other_thread_does_its_action_at_once(self):
        """
        Another thread does its action itself, before it goes on.
        """
        done_by = []
        with ThreadPoolExecutor(1) as other:
            other.submit(do_safely, lambda: done_by.append(threading.get_ident())).result()
            thread = other.submit(threading.get_ident).result()

        assert [thread] == done_by


def iter_once(value):
    """Yield what a function returns when the first element is asked for."""
    yield value()
