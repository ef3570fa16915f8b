"""
A gRPC proxy for tandem.executor.v1 that damages single messages of `Execute` when told to, and can
record the margin by which each token won.

    python -m tests.faults.proxies.message_proxy HOST:PORT

It passes bytes on and understands only what it must: which messages are steps and results.
"""

from __future__ import annotations

import queue
import random
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from tandem.link.codec.wire import MAX_MESSAGE_BYTES
from tests.faults.proxies.controlled import Json, serve_commands
from tests.faults.proxies.margins import MarginRecorder

HELD_S = 0.3
"""
Longest time in seconds that a message waits to change places with the next; then it goes out alone.
"""
_EXECUTE = "/tandem.executor.v1.ExecutorService/Execute"
_STEP_OR_RESULT = b"\x12"
"""First byte, field 2, of a step down and a result up; other messages are left alone."""
_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.max_ping_strikes", 0),
)


class _Failed:
    """The end of a source of messages, with its error if it failed."""

    def __init__(self, error: grpc.RpcError | None) -> None:
        self.error = error


class MessageProxy(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not at run time
    """Proxy on a free port; it passes every method on as a stream of bytes both ways."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        self._lock = threading.Lock()
        self._damages: dict[str, deque[tuple[str, int]]] = {"up": deque(), "down": deque()}
        self._num_done = 0
        self._recorder: MarginRecorder | None = None

    def start(self) -> int:
        """Listen; return the port."""
        server = grpc.server(ThreadPoolExecutor(16), handlers=[self], options=_OPTIONS)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        self._server = server
        return int(port)

    def damage(self, *, kind: str, way: str, draw: int) -> Json:
        """
        Damage the next step or result of one way ("up" or "down") that no earlier order applies to:
        "twice", "swap", "drop", "cut" or "flip".
        """
        with self._lock:
            self._damages[way].append((kind, draw))
            return {"done": self._num_done}

    def count(self) -> Json:
        """Return the number of messages that were damaged so far."""
        with self._lock:
            return {"done": self._num_done}

    def record(self) -> Json:
        """Record margins from now on; the executor must report them."""
        self._recorder = MarginRecorder()
        return {}

    def margins(self) -> Json:
        """Return the margins recorded so far."""
        assert self._recorder is not None
        return {"margins": self._recorder.as_json()}

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        """Return a handler that passes any method on."""
        path = details.method

        def carry(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            return self._carry(path, requests, context)

        return grpc.stream_stream_rpc_method_handler(carry)

    def _carry(
        self, path: str, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        is_execute = path == _EXECUTE
        down = self._mistreat(requests, "down") if is_execute else requests
        limit_s = None if is_execute else context.time_remaining()
        # Without serializers: bytes both ways.
        call: Any = self._channel.stream_stream(path, None, None)(down, timeout=limit_s)
        context.add_callback(call.cancel)
        try:
            yield from self._mistreat(call, "up") if is_execute else call
        except grpc.RpcError as error:
            self._fail(error, context)

    def _fail(self, error: Any, context: grpc.ServicerContext) -> None:
        """End a call as the target ended it."""
        context.set_trailing_metadata(tuple(error.trailing_metadata() or ()))
        context.abort(error.code(), error.details() or "")

    def _mistreat(self, source: Iterator[bytes], way: str) -> Iterator[bytes]:
        """Yield the messages of one way, damaged as ordered."""
        arrived: queue.SimpleQueue[bytes | _Failed] = queue.SimpleQueue()
        threading.Thread(target=_pump, args=(source, arrived), daemon=True).start()
        held: bytes | None = None
        while True:
            try:
                item = arrived.get(timeout=HELD_S if held is not None else None)
            except queue.Empty:
                assert held is not None
                yield held
                held = None
                continue
            if isinstance(item, _Failed):
                if item.error is not None:
                    raise item.error
                return
            if self._recorder is not None:
                self._recorder.note(item, way)
            for raw in self._outcomes(item, way):
                if raw is None:
                    held = item
                    continue
                yield raw
                if held is not None:
                    yield held
                    held = None

    def _outcomes(self, raw: bytes, way: str) -> list[bytes | None]:
        """Return what goes out for a message; None means that it changes places with the next."""
        if not raw.startswith(_STEP_OR_RESULT):
            return [raw]
        with self._lock:
            damage = self._damages[way].popleft() if self._damages[way] else None
            self._num_done += damage is not None
        if damage is None:
            return [raw]
        source = random.Random(damage[1])
        place, bit = source.randrange(len(raw)), 1 << source.randrange(8)
        outcomes: dict[str, list[bytes | None]] = {
            "twice": [raw, raw],
            "drop": [],
            "swap": [None],
            "cut": [raw[:place]],
            "flip": [raw[:place] + bytes([raw[place] ^ bit]) + raw[place + 1 :]],
        }
        return outcomes[damage[0]]


def _pump(source: Iterator[bytes], arrived: queue.SimpleQueue[bytes | _Failed]) -> None:
    error: grpc.RpcError | None = None
    try:
        for raw in source:
            arrived.put(raw)
    except grpc.RpcError as broken:
        error = broken
    arrived.put(_Failed(error))


def main() -> None:
    """Serve until stdin ends."""
    proxy = MessageProxy(sys.argv[1])
    commands = (proxy.damage, proxy.count, proxy.record, proxy.margins)
    serve_commands({"port": proxy.start()}, {command.__name__: command for command in commands})


if __name__ == "__main__":
    main()
