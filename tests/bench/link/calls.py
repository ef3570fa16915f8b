"""
Compare the calls that carry steps with gRPC's own streams: CPU time per step at both ends.

    python -m tests.bench.link.calls

Two processes joined by a unix socket: a scheduler's end sends a step each millisecond, and a thread
of the executor's end answers it, as the runner does. Each kind of call is measured in turns; printed
are medians over the rounds, in microseconds per step, of all threads of a process. The last line is
how much more the public streams cost. Takes half a minute.
"""

import multiprocessing
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from statistics import median

import grpc

from executor_svc.server.server_call import ServerCall
from scheduler_svc.executor_client.step_call import CallEnded, StepCall
from tandem.network.outgoing import OutgoingMessages
from tests.bench.machine import machine

METHOD = "/tandem.executor.v1.ExecutorService/Execute"
KINDS = ("operations", "streams")
ROUNDS = 5
STEPS = 2000
INTERVAL_S = 0.001
STEP_BYTES, RESULT_BYTES = 2048, 1024
"""Sizes of messages, near those of a decode step of 256 rows."""


def operations_at_server(
    _requests: Iterator[bytes], context: grpc.ServicerContext
) -> Iterator[bytes]:
    """Answer steps through `ServerCall`, as the executor does."""
    call = ServerCall(context)
    steps: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    outgoing = OutgoingMessages(lambda message: call.send(message, outgoing.left))
    context.send_initial_metadata(())
    call.receive(lambda raw: steps.put(raw) is None)
    while steps.get() is not None:
        outgoing.put(bytes(RESULT_BYTES))
    yield from ()


def streams_at_server(requests: Iterator[bytes], _context: grpc.ServicerContext) -> Iterator[bytes]:
    """Answer steps through the public interface, which needs a thread that reads."""
    steps: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    results: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def read() -> None:
        try:
            for raw in requests:
                steps.put(raw)
        except grpc.RpcError:
            pass  # the caller has cancelled
        finally:
            steps.put(None)

    def compute() -> None:
        while steps.get() is not None:
            results.put(bytes(RESULT_BYTES))
        results.put(None)

    threading.Thread(target=read, daemon=True).start()
    threading.Thread(target=compute, daemon=True).start()
    yield from iter(results.get, None)


def serve(kind: str, address: str, pipe: Connection) -> None:
    """Serve calls of a kind; answer each message of the pipe with the CPU seconds so far."""
    behavior = operations_at_server if kind == "operations" else streams_at_server
    service, name = METHOD[1:].split("/")
    handler = grpc.stream_stream_rpc_method_handler(behavior)
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {name: handler}),)
        )
        server.add_insecure_port(address)
        server.start()
        pipe.send(None)
        while pipe.recv():
            pipe.send(time.process_time())
        server.stop(None).wait()


def exchange(kind: str, channel: grpc.Channel) -> Iterator[None]:
    """Send a step per `next`, and read results on a thread of their own until it is closed."""
    results: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    if kind == "operations":
        call = StepCall(channel)
        put, messages = call.outgoing.put, call.messages()
    else:
        steps: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        call = messages = channel.stream_stream(METHOD)(iter(steps.get, None))
        put = steps.put

    def read() -> None:
        try:
            for raw in messages:
                results.put(raw)
        except (CallEnded, grpc.RpcError):
            pass  # cancelled below

    reader = threading.Thread(target=read)
    reader.start()
    try:
        while True:
            put(bytes(STEP_BYTES))
            assert RESULT_BYTES == len(results.get(timeout=10))
            yield
    finally:
        call.cancel()
        if kind == "streams":
            put(None)
        reader.join()


def measure(kind: str) -> tuple[float, float]:
    """Return the CPU microseconds per step of the scheduler's and of the executor's end."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/socket"
        process = context.Process(target=serve, args=(kind, address, theirs))
        process.start()
        ours.recv()
        with grpc.insecure_channel(address) as channel:
            steps = exchange(kind, channel)
            for _ in range(100):  # connected, and past what happens once
                next(steps)
            ours.send(True)
            before_s = time.process_time(), ours.recv()
            for _ in range(STEPS):
                time.sleep(INTERVAL_S)
                next(steps)
            ours.send(True)
            after_s = time.process_time(), ours.recv()
            steps.close()
        ours.send(False)
        process.join()
    scheduler, executor = (
        1e6 * (after - before) / STEPS for before, after in zip(before_s, after_s, strict=True)
    )
    return scheduler, executor


def main() -> int:
    rounds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for _ in range(ROUNDS):
        for kind, measured in rounds.items():
            measured.append(measure(kind))
    print(machine())
    ends = {kind: [median(end) for end in zip(*rounds[kind], strict=True)] for kind in KINDS}
    for kind, (scheduler, executor) in ends.items():
        print(f"{kind}: scheduler's end {scheduler:.0f} us, executor's end {executor:.0f} us")
    more = [100 * (b / a - 1) for a, b in zip(ends["operations"], ends["streams"], strict=True)]
    print(f"streams cost more: {more[0]:.0f} % and {more[1]:.0f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
