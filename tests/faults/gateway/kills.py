"""
`python -m tests.faults.gateway.kills --streams 64 --kills 20`: schedulers are killed under streams over HTTP.

Two schedulers with an executor each stand behind one gateway. Clients read streams with seeds, over
and over, while one scheduler after the other is killed and started again. Every text must be that
of a run without kills: users of HTTP notice a pause only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx

from tests.e2e.cluster import PATIENCE, Process
from tests.ports import free_port

PROMPT = "def fibonacci(n):"
NUM_TOKENS = 200
STEP_MS = 20
LIMIT_S = 120.0
ROWS = 64


@dataclass(slots=True)
class Outcome:
    """
    Findings of one run.

    Attributes:
        streams: Streams that were read at the same time.
        kills: Kills of a scheduler.
        read: Streams that were read to their end while schedulers were killed.
        different: Streams whose text was not that of a run without kills.
        failed: Streams that ended with an error, as text.
        resumes: Tries of the gateway to resume a stream.
        longest_pause_s: Longest time without new text in a stream.
        longest_restart_s: Longest time from the start of a scheduler until it is ready. It bounds
            what a pause may be: where the machine starves all processes, both are long.
    """

    streams: int
    kills: int
    read: int = 0
    different: int = 0
    failed: list[str] = field(default_factory=list)
    resumes: int = 0
    longest_pause_s: float = 0.0
    longest_restart_s: float = 0.0


class Pair:
    """A scheduler and its executor; the scheduler can be killed and started again."""

    def __init__(self, folder: Path, name: str, stack: ExitStack) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._executor_address = f"127.0.0.1:{free_port()}"
        self._folder = folder
        self._name = name
        arguments = [
            f"--listen={self._executor_address}",
            f"--step-ms={STEP_MS}",
            f"--rows={ROWS}",
            "--max-num-blocks=8192",
        ]
        executor = Process("tandem_bench.fixed_step", arguments, folder, f"{name}-executor")
        stack.callback(executor.end)
        executor.addresses()
        self.start()
        stack.callback(self.kill)

    def start(self) -> None:
        """Start the scheduler at its address."""
        arguments = [
            f"--listen={self.address}",
            f"--executor={self._executor_address}",
            "--admin-listen=127.0.0.1:0",
            "--metrics-listen=127.0.0.1:0",
            "--lease-ms=1000",
            *PATIENCE,
        ]
        self._scheduler = Process(
            "scheduler_svc", arguments, self._folder, f"{self._name}-scheduler"
        )

    def kill(self) -> None:
        """Kill the scheduler with all its processes."""
        self._scheduler.end()


class Clients:
    """Readers of streams over HTTP."""

    def __init__(self, url: str, outcome: Outcome) -> None:
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(
            base_url=url, timeout=LIMIT_S, trust_env=False, limits=limits
        )
        self._outcome = outcome
        self._texts: dict[int, str] = {}

    async def learn(self, seed: int) -> None:
        """Read the text that this seed gives without kills."""
        self._texts[seed] = "".join([text async for text in self._stream(seed)])

    async def read_until(self, seed: int, is_over: asyncio.Event) -> None:
        """Read the stream of this seed again and again, and compare its text each time."""
        while not is_over.is_set():
            try:
                text = ""
                last_s = time.monotonic()
                async for piece in self._stream(seed):
                    now = time.monotonic()
                    pause_s, last_s = now - last_s, now
                    self._outcome.longest_pause_s = max(self._outcome.longest_pause_s, pause_s)
                    text += piece
            except (httpx.HTTPError, RuntimeError) as error:
                self._outcome.failed.append(f"{type(error).__name__}: {error}")
            else:
                self._outcome.read += 1
                self._outcome.different += text != self._texts[seed]

    async def ready(self, num_schedulers: int) -> None:
        """Wait until so many schedulers serve requests."""
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s:
            answer = await self._http.get("/health")
            if sum(answer.json()["schedulers"].values()) == num_schedulers:
                return
            await asyncio.sleep(0.05)
        raise RuntimeError(f"{num_schedulers} schedulers are not ready within {LIMIT_S} s")

    async def resumes(self) -> int:
        """Return how often the gateway has tried to resume a stream."""
        page = (await self._http.get("/metrics")).text
        line = next(one for one in page.splitlines() if one.startswith("tandem_gateway_resumes_t"))
        return int(float(line.split()[1]))

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _stream(self, seed: int) -> AsyncIterator[str]:
        body = {
            "prompt": PROMPT,
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "seed": seed,
            "temperature": 1,
            "stream": True,
        }
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode()}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    return
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                yield event["choices"][0]["text"]
        raise RuntimeError("the stream ended before [DONE]")


def storm(folder: Path, *, num_streams: int, num_kills: int) -> Outcome:
    """Start all processes in a folder, kill schedulers under the streams, and return what came."""
    outcome = Outcome(num_streams, num_kills)
    with ExitStack() as stack:
        pairs = [Pair(folder, name, stack) for name in ("one", "other")]
        schedulers = ",".join(pair.address for pair in pairs)
        arguments = [f"--scheduler={schedulers}", "--listen=127.0.0.1:0"]
        gateway = Process("tandem_openai_gateway", arguments, folder, "gateway")
        stack.callback(gateway.end)
        url = f"http://{gateway.addresses()['address']}"
        asyncio.run(_kill_under_streams(url, pairs, outcome))
    return outcome


async def _kill_under_streams(url: str, pairs: list[Pair], outcome: Outcome) -> None:
    clients = Clients(url, outcome)
    seeds = range(outcome.streams)
    try:
        await clients.ready(len(pairs))
        await asyncio.gather(*(clients.learn(seed) for seed in seeds))
        is_over = asyncio.Event()
        readers = [asyncio.create_task(clients.read_until(seed, is_over)) for seed in seeds]
        for number in range(outcome.kills):
            await asyncio.sleep(1.0)  # the moment of a kill within the streams is any
            pair = pairs[number % len(pairs)]
            await asyncio.to_thread(pair.kill)
            await clients.ready(len(pairs) - 1)
            started_s = time.monotonic()
            pair.start()
            await clients.ready(len(pairs))
            restart_s = time.monotonic() - started_s
            outcome.longest_restart_s = max(outcome.longest_restart_s, restart_s)
        is_over.set()
        await asyncio.gather(*readers)
        outcome.resumes = await clients.resumes()
    finally:
        await clients.close()


def main() -> int:
    """Run a storm and print what came; return 1 if a stream was changed or failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64, help="streams at a time; default: 64")
    parser.add_argument("--kills", type=int, default=20, help="kills; default: 20")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        outcome = storm(Path(folder), num_streams=given.streams, num_kills=given.kills)
    sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
    return 1 if outcome.failed or outcome.different else 0


if __name__ == "__main__":
    sys.exit(main())
