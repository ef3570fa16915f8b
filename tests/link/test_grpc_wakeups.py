"""Wake-ups of event loops by grpc.aio: how many turns of a loop a burst of events takes."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import grpc.aio
import pytest
import uvloop

from tandem.network.grpc_wakeups import read_all_wakeups

NUM_CALLS = 400
BUSY_S = 1.0
SLOW, SLOW_S = b"slow", 0.1
"""Request that is answered late, and how late, seconds."""


class CountingLoop(asyncio.SelectorEventLoop):
    """A loop that counts its turns."""

    num_turns = 0

    def _run_once(self) -> None:
        self.num_turns += 1
        super()._run_once()


class Echo(grpc.GenericRpcHandler):
    def service(self, _details):
        return grpc.unary_unary_rpc_method_handler(echo)


def echo(request: bytes, _context: object) -> bytes:
    if request == SLOW:
        time.sleep(SLOW_S)
    return request


def echo_server() -> tuple[grpc.Server, str]:
    server = grpc.server(ThreadPoolExecutor(4), handlers=[Echo()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, f"127.0.0.1:{port}"


async def calls(address: str) -> tuple[int, int]:
    """Make all calls, hold the loop while events come in; return answers and turns after that."""
    loop = asyncio.get_running_loop()
    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        made = [asyncio.ensure_future(channel.unary_unary("/e/e")(b"x")) for _ in range(NUM_CALLS)]
        await asyncio.sleep(0.01)
        time.sleep(BUSY_S)  # noqa: ASYNC251  # the loop is to be held up
        before = getattr(loop, "num_turns", 0)
        answers = await asyncio.gather(*made)
        await asyncio.sleep(0.2)  # wake-ups that are left make further turns
        return answers.count(b"x"), getattr(loop, "num_turns", 0) - before


def run(*, reads_all: bool) -> tuple[int, int]:
    """Run the calls on a loop of this process, and print what came of them."""
    server, address = echo_server()
    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        if reads_all:
            read_all_wakeups(runner.get_loop())
        told = runner.run(calls(address))
    server.stop(0)
    return told


def in_a_process(*, reads_all: bool) -> tuple[int, int]:
    """Run in a process without other loops, which would share the wake-ups."""
    program = (
        f"from {__name__} import run; import json; print(json.dumps(run(reads_all={reads_all})))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    num_answers, num_turns = json.loads(ran.stdout)
    return num_answers, num_turns


kept: list[object] = []
"""Calls and channels of loops that were closed, which would end if they were freed."""


def run_after_a_closed_loop() -> int:
    """Return the answers that a loop gets while those of a loop that was closed come too."""
    server, address = echo_server()

    async def leave_calls() -> None:
        channel = grpc.aio.insecure_channel(address)
        await channel.channel_ready()
        made = [channel.unary_unary("/e/e")(SLOW) for _ in range(20)]
        kept.extend((channel, made, asyncio.all_tasks()))
        await asyncio.sleep(0.05)

    closed = asyncio.new_event_loop()
    closed.run_until_complete(leave_calls())
    closed.close()
    with asyncio.Runner() as runner:
        read_all_wakeups(runner.get_loop())
        answers, _ = runner.run(asyncio.wait_for(calls(address), 30.0))
    server.stop(0)
    return answers


class TestTurns:
    @pytest.mark.slow
    def test_burst_of_events_takes_few_turns(self):
        """
        Calls whose events came while the loop was busy are answered in a fraction of the turns
        that grpc.aio takes by itself, one for each wake-up.
        """
        answers, turns = in_a_process(reads_all=True)
        plain_answers, plain_turns = in_a_process(reads_all=False)
        assert (NUM_CALLS, NUM_CALLS) == (answers, plain_answers)
        assert 2 * turns < plain_turns


class TestLoops:
    @pytest.mark.slow
    @pytest.mark.parametrize("make", [asyncio.new_event_loop, uvloop.new_event_loop])
    def test_calls_are_answered_on_either_loop(self, make):
        """
        Every call is answered, on asyncio's own loop and on uvloop's.
        """
        server, address = echo_server()
        with asyncio.Runner(loop_factory=make) as runner:
            read_all_wakeups(runner.get_loop())
            assert NUM_CALLS == runner.run(calls(address))[0]
        server.stop(0)

    @pytest.mark.slow
    def test_answers_of_a_closed_loop_hold_up_no_others(self):
        """
        Answers to calls of a loop that was closed meanwhile are lost; those of another loop come.
        """
        program = f"from {__name__} import run_after_a_closed_loop as run; print(run(), flush=True)"
        command = [sys.executable, "-c", f"{program}; import os; os._exit(0)"]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
        assert NUM_CALLS == int(ran.stdout)

    def test_other_readers_are_as_they_were(self):
        """
        A reader of anything else is called with its own arguments, and can be removed.
        """
        loop = asyncio.new_event_loop()
        read_all_wakeups(loop)
        ours, theirs = socket.socketpair()
        got: list[str] = []
        loop.add_reader(ours, lambda word: (got.append(word), loop.stop()), "word")
        theirs.send(b"x")
        loop.run_forever()
        assert loop.remove_reader(ours)
        assert ["word"] == got
        loop.close()
        ours.close()
        theirs.close()
