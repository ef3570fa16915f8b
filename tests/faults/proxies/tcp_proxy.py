"""
A TCP proxy that treats connections badly when told to.

    python -m tests.faults.proxies.tcp_proxy HOST:PORT

Bytes that were read are never invented or lost unless the fault says so. While packets are
"dropped" the proxy reads nothing, so that both ends see a network that swallows everything; TCP's
own repetition brings it all once the network is back.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tests.faults.proxies.controlled import Json, serve_commands

Result = TypeVar("Result")

_CHUNK_BYTES = 65_536
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER with time 0: closing sends RST."""


@dataclass(frozen=True, slots=True)
class _Damage:
    """Damage to the next bytes of one direction."""

    kind: str
    draw: int


class _Connection:
    """Two sockets and a pump for each direction."""

    def __init__(
        self,
        proxy: TcpProxy,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self._proxy = proxy
        self._writers = (client[1], server[1])
        self._down = (client[0], server[1])
        self._up = (server[0], client[1])

    async def run(self) -> None:
        """Carry bytes until either end closes."""
        pumps = [
            asyncio.create_task(self._pump(*self._down, "down")),
            asyncio.create_task(self._pump(*self._up, "up")),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for writer in self._writers:
            writer.close()

    def reset(self) -> None:
        """Close both ends with a reset."""
        for writer in self._writers:
            if writer.is_closing():  # its peer and socket are gone, and our pump does not know yet
                continue
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            writer.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str
    ) -> None:
        proxy = self._proxy
        try:
            while True:
                await proxy.flowing.wait()
                chunk = await reader.read(_CHUNK_BYTES)
                await proxy.flowing.wait()  # a chunk in transit when the network went is late too
                if not chunk:
                    return
                if proxy.latency_s:
                    await asyncio.sleep(proxy.latency_s + len(chunk) / proxy.bytes_per_s)
                damage = proxy.damages[way].popleft() if proxy.damages[way] else None
                if damage is not None:
                    proxy.num_done += 1
                    chunk = _damaged(chunk, damage)
                writer.write(chunk)
                await writer.drain()
                if damage is not None and damage.kind == "cut":
                    return
        except OSError:
            return


def _damaged(chunk: bytes, damage: _Damage) -> bytes:
    source = random.Random(damage.draw)
    if damage.kind == "cut":
        return chunk[: source.randrange(len(chunk))]
    changed = bytearray(chunk)
    for _ in range(source.randint(1, 3)):
        changed[source.randrange(len(changed))] ^= 1 << source.randrange(8)
    return bytes(changed)


class TcpProxy:
    """Proxy that listens on a free port and connects every client to the target."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._connections: set[_Connection] = set()
        self._loop = asyncio.new_event_loop()
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.latency_s = 0.0
        self.bytes_per_s = 1e9
        self.damages: dict[str, deque[_Damage]] = {"up": deque(), "down": deque()}
        self.num_done = 0

    def start(self) -> int:
        """Listen; return the port."""
        listening = self._loop.run_until_complete(
            asyncio.start_server(self._connect, "127.0.0.1", 0)
        )
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        return int(listening.sockets[0].getsockname()[1])

    def reset(self) -> Json:
        """Reset every connection; return how many there were."""
        return {"reset": self._call(self._reset)}

    def flow(self, *, on: bool) -> Json:
        """Drop all packets, or let them pass again."""
        self._call(self.flowing.set if on else self.flowing.clear)
        return {}

    def slow(self, *, latency_s: float, bytes_per_s: float) -> Json:
        """Delay every chunk; 0 seconds for a fast link."""

        def set_speed() -> None:
            self.latency_s, self.bytes_per_s = latency_s, bytes_per_s

        self._call(set_speed)
        return {}

    def damage(self, *, kind: str, way: str, draw: int) -> Json:
        """
        Cut ("cut") or change ("flip") the next bytes of one way ("up" or "down") that no earlier
        order applies to.
        """

        def note() -> None:
            self.damages[way].append(_Damage(kind, draw))

        self._call(note)
        return {}

    def count(self) -> Json:
        """Return how many chunks were damaged, and connections reset, so far."""
        return {"done": self.num_done}

    def _reset(self) -> int:
        for connection in self._connections:
            connection.reset()
        self.num_done += len(self._connections)
        return len(self._connections)

    def _call(self, function: Callable[[], Result]) -> Result:
        async def run() -> Result:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        connection = _Connection(self, (reader, writer), server)
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)


def main() -> None:
    """Serve until stdin ends."""
    proxy = TcpProxy(sys.argv[1])
    serve_commands(
        {"port": proxy.start()},
        {
            "reset": proxy.reset,
            "flow": proxy.flow,
            "slow": proxy.slow,
            "damage": proxy.damage,
            "count": proxy.count,
        },
    )


if __name__ == "__main__":
    main()
