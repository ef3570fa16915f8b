"""Streams that run all the time while something happens to pods, and what became of them."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from tandem.errors import TandemError
from tandem_client import NO_RETRY, Client, RetryPolicy
from tandem_client.events import Delta

TOKENS = 256
PROMPT = "def read_json(path: str) -> dict:\n"
PATIENT = RetryPolicy(max_attempts=30)
"""Resumes streams as by default, and asks for new ones for minutes while no scheduler is there."""
MAX_MESSAGES = 5
"""Messages of failed streams that are kept."""


@dataclass(slots=True)
class Outcome:
    """
    The streams of one load.

    Attributes:
        finished: Number of streams with all their tokens, each once and in order.
        failed: Number of other streams.
        longest_pause_s: Longest time between two messages of one stream.
        messages: Errors of some of those that failed.
    """

    finished: int = 0
    failed: int = 0
    longest_pause_s: float = 0.0
    messages: list[str] = field(default_factory=list)


class Load:
    """
    A number of threads that each read one stream after another.

    Attributes:
        outcome: What became of streams so far.
    """

    def __init__(self, address: str, num_streams: int, *, resumes: bool = False) -> None:
        """
        Args:
            address: Address of the scheduler.
            num_streams: Number of threads.
            resumes: True for clients that retry and resume (`PATIENT`); False for such that do
                neither, so that each stream must run to its end by itself.
        """
        self.outcome = Outcome()
        self._address = address
        self._retry = PATIENT if resumes else NO_RETRY
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._running = [0] * num_streams
        """Tokens that the present stream of each thread has received."""
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(num_streams)
        ]

    def start(self) -> None:
        """Start all threads."""
        for thread in self._threads:
            thread.start()

    @property
    def num_running(self) -> int:
        """Number of streams that have received some of their tokens now."""
        return sum(0 < tokens < TOKENS for tokens in self._running)

    def end(self) -> Outcome:
        """Let the streams that run end, and return what became of all."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        return self.outcome

    def _run(self, number: int) -> None:
        turn = 0
        with Client(self._address, retry=self._retry) as client:
            while not self._stopping.is_set():
                turn += 1
                self._one_stream(client, number, seed=1000 * turn + number)

    def _one_stream(self, client: Client, number: int, seed: int) -> None:
        received, pause_s, error = 0, 0.0, "tokens are missing or repeated"
        last_s = None
        try:
            for event in client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True, seed=seed):
                if not isinstance(event, Delta):
                    continue
                now_s = time.monotonic()
                pause_s = max(pause_s, 0.0 if last_s is None else now_s - last_s)
                last_s = now_s
                if event.first_token_offset == received:
                    received += len(event.token_ids)
                self._running[number] = received
        except TandemError as failure:
            error = str(failure)
        self._running[number] = 0
        with self._lock:
            self.outcome.longest_pause_s = max(self.outcome.longest_pause_s, pause_s)
            if received == TOKENS:
                self.outcome.finished += 1
                return
            self.outcome.failed += 1
            if len(self.outcome.messages) < MAX_MESSAGES:
                self.outcome.messages.append(error)
