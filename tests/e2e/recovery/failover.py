"""A scheduler and several executors without a model, as processes that tests stop, kill and replace."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from tandem.errors import TandemError
from tandem_client import NO_RETRY, AdminClient, Client, Delta, is_serving
from tests.e2e.cluster import PATIENCE, Process, wait_idle
from tests.ports import free_port
from tests.waiting import LIMIT_S, wait_until

PROMPT = "def fibonacci(n):"
STEP_MS = 20
ENDLESS = 16_000
"""Number of tokens of a stream that takes five minutes, longer than any test."""
NO_LEASE_MS = 60_000
"""The longest lease that there is: a test whose scheduler has to wait for it runs out of time."""


class Fleet:
    """Processes that tests start; all end with `close`."""

    def __init__(self, folder: Path, *, num_executors: int = 1) -> None:
        self._folder = folder
        self._num_started = 0
        self._processes: list[Process] = []
        self.executor_addresses = [f"127.0.0.1:{free_port()}" for _ in range(num_executors)]

    def executor(self, place: int = 0, *, seed: int = 0) -> Process:
        """Start an executor at the address of this place; another seed is another model."""
        arguments = [
            f"--listen={self.executor_addresses[place]}",
            f"--step-ms={STEP_MS}",
            f"--seed={seed}",
            "--rows=32",
            "--max-num-blocks=8192",
            "--max-model-len=16384",
        ]
        executor = self._start("tandem_bench.fixed_step", arguments)
        executor.addresses()
        return executor

    def scheduler(self, *options: str, listen: str = "127.0.0.1:0") -> Scheduler:
        """Start a scheduler of the first executor; the others stand by."""
        arguments = [
            f"--executor={self.executor_addresses[0]}",
            *(
                [f"--standby={','.join(standby)}"]
                if (standby := self.executor_addresses[1:])
                else ()
            ),
            f"--listen={listen}",
            "--admin-listen=127.0.0.1:0",
            "--metrics-listen=127.0.0.1:0",
            f"--lease-ms={NO_LEASE_MS}",
            *PATIENCE,
            *options,
        ]
        return Scheduler(self._start("scheduler_svc", arguments))

    def close(self) -> None:
        """Kill all processes."""
        for process in self._processes:
            process.end()

    def logs(self) -> str:
        """Return the logs of all services, for the report of a failing test."""
        return "\n".join(f"== {one.log.name}\n{one.log.read_text()}" for one in self._processes)

    def _start(self, module: str, arguments: list[str]) -> Process:
        self._num_started += 1
        name = f"{self._num_started}-{module}"
        self._processes.append(Process(module, arguments, self._folder, name))
        return self._processes[-1]


class Scheduler:
    """One scheduler process and calls to it."""

    def __init__(self, process: Process) -> None:
        self.process = process
        addresses = process.addresses()
        self.address: str = addresses["address"]
        self._admin_address: str = addresses["admin_address"]

    def is_ready(self) -> bool:
        """Return if the public port says that requests are served."""
        with contextlib.suppress(TandemError):
            return is_serving(self.address, "tandem.ready", timeout_s=10)
        return False

    def wait_ready(self, *, ready: bool = True) -> None:
        """Wait until the scheduler is ready, or until it is not."""
        wait_until(lambda: self.is_ready() is ready, f"ready is {ready}")

    def log(self) -> str:
        """Return the log up to now."""
        return self.process.log.read_text()

    def stats(self):
        """Return the answer of GetStats."""
        with AdminClient(self._admin_address, retry=NO_RETRY) as admin:
            return admin.stats()

    def output_lens(self) -> list[int]:
        """Return the number of output tokens of each request in the system."""
        with AdminClient(self._admin_address, retry=NO_RETRY) as admin:
            return [one.output_tokens for one in admin.list_requests().requests]

    def wait_idle(self):
        """
        Wait until the scheduler holds nothing and does nothing; return the counters of that time.
        """
        return wait_idle(self.stats)


class Reader:
    """
    Readers of streams of one prompt, one per thread; each checks for lost and repeated tokens.

    Attributes:
        tokens: Tokens that each stream gave until now.
        errors: Errors that ended streams.
    """

    def __init__(
        self, scheduler: Scheduler, *, num_streams: int, num_tokens: int = ENDLESS
    ) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_streams)]
        self.errors: list[Exception] = []
        self._scheduler = scheduler
        self._num_tokens = num_tokens
        self._is_stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._read, args=(scheduler.address, place), daemon=True)
            for place in range(num_streams)
        ]
        for thread in self._threads:
            thread.start()

    def wait_for(self, num_tokens: int) -> None:
        """
        Wait until each stream has so many more tokens than the furthest request in the core has
        now.
        """
        wanted = num_tokens + max(self._scheduler.output_lens(), default=0)

        def has_come() -> bool:
            assert not self.errors, self.errors
            return all(len(tokens) >= wanted for tokens in self.tokens)

        wait_until(has_come, f"{num_tokens} more tokens")

    def finish(self) -> list[list[int]]:
        """Wait for the end of all streams; return their tokens."""
        for thread in self._threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), "a stream does not end"
        return self.tokens

    def stop(self) -> list[list[int]]:
        """Leave all streams; return the tokens that each has given."""
        self._is_stopping.set()
        return self.finish()

    def _read(self, address: str, place: int) -> None:
        tokens = self.tokens[place]
        options = {"max_tokens": self._num_tokens, "ignore_eos": True, "seed": place}
        try:
            with (
                Client(address, retry=NO_RETRY) as client,
                client.generate(PROMPT, temperature=1.0, **options) as stream,
            ):
                for event in stream:
                    if isinstance(event, Delta):
                        assert len(tokens) == event.first_token_offset
                        tokens += event.token_ids
                    if self._is_stopping.is_set():
                        break
        except (TandemError, AssertionError) as error:
            self.errors.append(error)
