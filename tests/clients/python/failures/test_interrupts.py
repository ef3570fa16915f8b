"""Streams whose reader is interrupted with Ctrl-C."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tandem_client.streams.interrupts import NUM_AHEAD, read_safely
from tests.clients.python.fake_server import ANSWER, PATIENCE_S, Act
from tests.waiting import wait_until

NUM_INTERRUPTS = 40


class Numbers:
    """A call that counts up, and knows the threads that have read it."""

    def __init__(self, last=10**9, error=None):
        self.num_read, self.threads = 0, set()
        self._last, self._error = last, error

    def __iter__(self):
        return self

    def __next__(self):
        self.threads.add(threading.current_thread())
        if self.num_read == self._last:
            raise self._error or StopIteration
        self.num_read += 1
        return self.num_read


class TestInterrupts:
    def test_client_answers_after_each_interrupted_stream(self, server):
        """
        A stream may be interrupted at any moment, and the client's next call is answered.
        """
        server.play(*[Act(num_tokens=8, hang=True), Act()] * NUM_INTERRUPTS)
        program = [sys.executable, "-m", "tests.clients.python.failures.interrupted_streams"]
        result = subprocess.run(
            [*program, server.address, str(NUM_INTERRUPTS)],
            check=False,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S + NUM_INTERRUPTS,
        )

        assert [ANSWER] * NUM_INTERRUPTS == result.stdout.splitlines(), result.stderr


class TestReadSafely:
    def test_main_thread_leaves_reading_to_another(self):
        """
        In the main thread, where interrupts are raised, none of the call's own code runs.
        """
        call = Numbers(last=3)

        assert [1, 2, 3] == list(read_safely(call))
        assert threading.main_thread() not in call.threads

    def test_other_thread_reads_the_call_itself(self):
        """
        A thread that no interrupt can reach needs no second one.
        """
        call = Numbers()
        with ThreadPoolExecutor(1) as other:
            assert call is other.submit(read_safely, call).result()

    def test_failure_comes_after_what_was_read(self):
        """
        The call's failure is raised once all messages before it have been given out.
        """
        messages = read_safely(Numbers(last=2, error=ValueError("broken")))

        assert [1, 2] == [next(messages), next(messages)]
        with pytest.raises(ValueError, match="broken"):
            next(messages)

    def test_slow_reader_is_few_messages_behind(self):
        """
        No more messages are read ahead than NUM_AHEAD, so that a slow reader slows the server.
        """
        call = Numbers()
        messages = read_safely(call)
        next(messages)
        wait_until(lambda: call.num_read == NUM_AHEAD, "read ahead")
        next(messages)
        wait_until(lambda: call.num_read == NUM_AHEAD + 1, "read one more")

        assert call.num_read == NUM_AHEAD + 1

    def test_dropped_iterator_ends_its_thread(self):
        """
        The thread ends once the iterator over its messages is freed.
        """
        call = Numbers()
        messages = read_safely(call)
        next(messages)
        del messages

        wait_until(lambda: not any(one.is_alive() for one in call.threads), "thread ends")
