"""
`python -m tests.bench.gateway`: tokens per second through the gateway, over those of gRPC directly.

One scheduler service and an executor whose steps take a fixed time serve both. A client process
reads all streams at once, first directly, then through the gateway, a few times in turn; all
processes share this machine's cores. Through HTTP the client looks for the end of a stream only,
so that it costs less than any real one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

from tandem_client import AsyncClient
from tests.bench.machine import machine
from tests.e2e.cluster import PATIENCE, Process, wait_until

PROMPT = "def fibonacci(n):"
END = b"data: [DONE]\n\n"
READ_BYTES = 1 << 16


async def direct(address: str, num_streams: int, num_tokens: int) -> None:
    """Read all streams with the Python client."""
    async with AsyncClient(address) as client:

        async def read(seed: int) -> None:
            options = {"max_tokens": num_tokens, "ignore_eos": True, "seed": seed}
            async for _ in client.generate(PROMPT, **options):
                pass

        await asyncio.gather(*(read(seed) for seed in range(num_streams)))


async def through(address: str, num_streams: int, num_tokens: int) -> None:
    """Read all streams over HTTP, each on a connection of its own."""
    host, _, port = address.rpartition(":")

    async def read(seed: int) -> None:
        body = json.dumps(
            {
                "prompt": PROMPT,
                "max_tokens": num_tokens,
                "ignore_eos": True,
                "seed": seed,
                "stream": True,
            }
        ).encode()
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        tail = b""
        while END not in tail:
            part = await reader.read(READ_BYTES)
            assert part, "a stream ended too early"
            tail = tail[-len(END) :] + part
        writer.close()

    await asyncio.gather(*(read(seed) for seed in range(num_streams)))


def cpu_s(process: Process) -> float:
    """Return the CPU time of a process and its children so far."""
    times = [member.cpu_times() for member in process.family()]
    return sum(one.user + one.system for one in times)


def measure(
    read: Callable[[str, int, int], Awaitable[None]], address: str, streams: int, tokens: int
) -> float:
    """Return the tokens per second of one round."""
    started_s = time.monotonic()
    asyncio.run(read(address, streams, tokens))
    return streams * tokens / (time.monotonic() - started_s)


def compare(folder: Path, step_ms: float, given: argparse.Namespace) -> dict:
    """Start the processes, measure both ways in turn, and return the medians."""
    with ExitStack() as stack:

        def start(module: str, *arguments: str) -> Process:
            process = Process(module, list(arguments), folder, f"{module}-{step_ms}")
            stack.callback(process.end)
            return process

        rows = [f"--rows={given.streams}", "--max-num-blocks=16384", f"--step-ms={step_ms}"]
        executor = start("tandem_bench.fixed_step", "--listen=127.0.0.1:0", *rows)
        scheduler = start(
            "scheduler_svc",
            f"--executor={executor.addresses()['address']}",
            *(f"--{name}=127.0.0.1:0" for name in ("listen", "admin-listen", "metrics-listen")),
            *PATIENCE,
        )
        address = scheduler.addresses()["address"]
        gateway = start("tandem_openai_gateway", f"--scheduler={address}", "--listen=127.0.0.1:0")
        http = gateway.addresses()["address"]
        for read, at in ((direct, address), (through, http)):
            wait_until(lambda read=read, at=at: answers(read, at), "an answer")
        found: dict[str, list[float]] = {"direct": [], "gateway": []}
        before_s = cpu_s(gateway)
        for _ in range(given.rounds):
            found["direct"].append(measure(direct, address, given.streams, given.tokens))
            found["gateway"].append(measure(through, http, given.streams, given.tokens))
        used_s = cpu_s(gateway) - before_s
    tokens = given.rounds * given.streams * given.tokens
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {
        "step_ms": step_ms,
        "streams": given.streams,
        "direct_tokens_per_s": round(medians["direct"]),
        "gateway_tokens_per_s": round(medians["gateway"]),
        "ratio": round(medians["gateway"] / medians["direct"], 3),
        "gateway_cpu_us_per_token": round(used_s / tokens * 1e6, 1),
    }


def answers(read: Callable[[str, int, int], Awaitable[None]], address: str) -> bool:
    """Return True once a short stream comes to its end."""
    try:
        asyncio.run(asyncio.wait_for(read(address, 1, 2), 30))
    except AssertionError:
        return False
    return True


def main() -> None:
    """Measure with several durations of a step, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64, help="streams at a time; default: 64")
    parser.add_argument("--tokens", type=int, default=300, help="tokens a stream; default: 300")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of both; default: 3")
    parser.add_argument(
        "--step-ms", type=float, nargs="+", default=[40.0, 20.0, 5.0], help="default: 40 20 5"
    )
    given = parser.parse_args()
    print(json.dumps({"machine": machine(), "load": os.getloadavg()[0]}))
    for step_ms in given.step_ms:
        with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
            print(json.dumps(compare(Path(folder), step_ms, given)), flush=True)


if __name__ == "__main__":
    main()
