"""The system that the live check watches: executors, a scheduler, a gateway, and their load."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil

from tandem.bearer_token import token_hash
from tandem.errors import TandemError
from tandem_client import NO_RETRY, AdminClient, Client
from tests import model_zoo
from tests.certificates import Authority
from tests.deploy.monitoring.faulty import obeyed_environment
from tests.e2e.cluster import Process
from tests.e2e.step_gate import StepGate
from tests.ports import free_port
from tests.threads import NUM_THREADS

TOKEN = "a-token-of-the-live-check"
NUM_EXECUTORS = 2
STREAMS = 4
"""Streams of the load at a time."""
LIMITS = ("--max-num-blocks=96", "--max-model-len=512", "--max-batch-size=24", "--dtype=float32")
SCHEDULER = (
    "--frontends=2",
    "--max-num-seqs=32",
    "--lost-after-s=600",
    "--move-after-s=4",
    "--recovery-timeout-s=600",
    "--stall-deadline-s=3",
    "--stream-buffer-bytes=65536",
)


class System:
    """
    Two executors, one scheduler with two frontends and a certificate, and a gateway. An executor
    that ends is started again, unless it was put out of service.

    Attributes:
        folder: Folder of logs, certificates and everything else.
        authority: CA of the scheduler's certificate.
        executors: The executors, by number; None while one is out of service.
        scheduler: The scheduler's process.
        gateway: The gateway's process.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder)
        self.renew(days=90)
        self._model = model_zoo.llama_mha(folder / "tiny-llama")
        self.other_model = model_zoo.qwen2(folder / "other")
        self._tokens = folder / "tokens.json"
        roles = ["generate", "operate", "delegate"]
        credential = {"name": "check", "tenant": "check", "roles": roles}
        credential["token_sha256"] = token_hash(TOKEN)
        self._tokens.write_text(json.dumps({"credentials": [credential]}))
        names = ("listen", "admin", "metrics", "gateway")
        self.ports = {name: f"127.0.0.1:{free_port()}" for name in names}
        self.executor_ports = [f"127.0.0.1:{free_port()}" for _ in range(NUM_EXECUTORS)]
        self.folders = [folder / f"executor-{number}" for number in range(NUM_EXECUTORS)]
        for one in self.folders:
            one.mkdir()
        self.gates = [StepGate(one / "gate") for one in self.folders]
        self.executors: list[Process | None] = [None] * NUM_EXECUTORS
        self._is_wanted = [True] * NUM_EXECUTORS
        self._num_started = 0
        self._is_closing = threading.Event()
        self._guards = [
            threading.Thread(target=self._start_again, args=(number,), daemon=True)
            for number in range(NUM_EXECUTORS)
        ]
        self.start_scheduler()
        for number in range(NUM_EXECUTORS):
            self.start_executor(number)
        for guard in self._guards:
            guard.start()
        self.start_gateway()

    def renew(self, *, days: float) -> None:
        """Give the scheduler a certificate that is valid for so many days."""
        until = datetime.now(UTC) + timedelta(days=days)
        self.pair = self.authority.issue("server", not_after=until)

    def start_scheduler(self) -> None:
        """Start the scheduler on its ports and wait until it listens."""
        ports = [f"--{name}={self.ports[port]}" for name, port in (
            ("listen", "listen"), ("admin-listen", "admin"), ("metrics-listen", "metrics"))]  # fmt: skip
        files = [f"--tls-cert={self.pair.certificate}", f"--tls-key={self.pair.key}"]
        executors = f"--executor={','.join(self.executor_ports)}"
        tokens = f"--tokens-file={self._tokens}"
        arguments = [executors, *ports, *files, tokens, *SCHEDULER]
        self.scheduler = Process("scheduler_svc", arguments, self.folder, self._name("scheduler"))
        self.scheduler.addresses()

    def start_executor(self, number: int, model: Path | None = None) -> None:
        """Start an executor in its place, with another model if one is given."""
        address = self.executor_ports[number]
        arguments = [f"--model={model or self._model}", f"--listen={address}"]
        executor = Process(
            "tests.deploy.monitoring.faulty",
            [*arguments, f"--num-threads={NUM_THREADS}", *LIMITS],
            self.folder,
            self._name("executor"),
            obeyed_environment(self.folders[number]),
        )
        executor.addresses()
        self.executors[number] = executor
        self._is_wanted[number] = True

    def stop_executor(self, number: int, *, is_wanted: bool = False) -> None:
        """Kill an executor; it stays away unless it is wanted, and is then started again."""
        self._is_wanted[number] = is_wanted
        executor = self.executors[number]
        if executor is not None:
            executor.end()

    def start_gateway(self) -> None:
        """Start the gateway on its port."""
        arguments = [f"--scheduler={self.ports['listen']}", f"--listen={self.ports['gateway']}"]
        arguments.append(f"--scheduler-ca={self.authority.file}")
        self.gateway = Process(
            "tandem_openai_gateway", arguments, self.folder, self._name("gateway")
        )
        self.gateway.addresses()

    def client(self, token: str = TOKEN) -> Client:
        """Return a client that retries nothing."""
        return Client(self.ports["listen"], retry=NO_RETRY, api_key=token, ca=self.authority.file)

    def admin(self) -> AdminClient:
        """Return a client of the operators' port."""
        return AdminClient(
            self.ports["admin"], retry=NO_RETRY, api_key=TOKEN, ca=self.authority.file
        )

    def frontends(self) -> list[psutil.Process]:
        """Return the frontend processes, in the order of their start."""
        children = psutil.Process(self.scheduler.process.pid).children()
        return sorted(children, key=lambda one: one.create_time())

    @contextlib.contextmanager
    def stopped(self, *processes: Process | psutil.Process) -> Iterator[None]:
        """Stop processes (SIGSTOP) during the block."""
        pids = [one.process.pid if isinstance(one, Process) else one.pid for one in processes]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        """Kill everything."""
        self._is_closing.set()
        for guard in self._guards:
            guard.join()
        for one in (self.gateway, self.scheduler, *self.executors):
            if one is not None:
                one.end()

    def _start_again(self, number: int) -> None:
        while not self._is_closing.wait(0.2):
            executor = self.executors[number]
            ended = executor is not None and executor.process.poll() is not None
            if ended and self._is_wanted[number]:
                self.start_executor(number)

    def _name(self, service: str) -> str:
        self._num_started += 1
        return f"{self._num_started}-{service}"


class Load:
    """Streams over gRPC, and calls over the gateway, that begin again as they end."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._is_over = threading.Event()
        turns = [self._stream] * STREAMS + [self._http]
        self._threads = [threading.Thread(target=turn, daemon=True) for turn in turns]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End all of it."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _stream(self) -> None:
        with self._system.client() as client:
            while not self._is_over.wait(0.05):
                with contextlib.suppress(TandemError):
                    prompt = list(range(20, 60))
                    stream = client.generate(
                        token_ids=prompt, max_tokens=40, ignore_eos=True, deadline_s=60
                    )
                    for _ in stream:
                        if self._is_over.is_set():
                            return

    def _http(self) -> None:
        body = json.dumps({"model": "tiny-llama", "prompt": [20, 21, 22], "max_tokens": 8})
        while not self._is_over.wait(0.2):
            request = urllib.request.Request(
                f"http://{self._system.ports['gateway']}/v1/completions",
                body.encode(),
                {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"},
            )
            try:
                urllib.request.urlopen(request, timeout=10).read()
            except OSError:  # of which HTTPError is a kind
                continue
