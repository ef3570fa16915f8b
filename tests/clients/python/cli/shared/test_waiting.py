"""Remarks on what is waited for, made after a while and once."""

from __future__ import annotations

import signal
import socket
import threading

import pytest

from tandem_client import Client, Delta, Prefilled, Queued, ResolvedParams, Scheduled, Started
from tandem_client.cli.shared import waiting
from tests.clients.python.fake_server import ANSWER, PATIENCE_S, Act

SUSPENDED = "an operator suspended it: go on with tandem resume"
PARAMS = ResolvedParams(
    temperature=1.0, top_k=0, top_p=1.0, seed=1, max_tokens=1, stop=(), stop_token_ids=(),
    ignore_eos=False, n=1, priority=0,
)  # fmt: skip
STARTED = Started(
    request_id="a", params=PARAMS, prompt_tokens=9, model_revision="", truncated_prompt_tokens=0
)
DELTA = Delta(choice=0, first_token_offset=0, token_ids=(1,), text="x")


@pytest.fixture
def said(monkeypatch):
    """Remarks that were made, as they come, with no time waited before them."""
    lines = []
    more = threading.Condition()

    def say(line):
        with more:
            lines.append(line)
            more.notify()

    def wait_for(count):
        with more:
            assert more.wait_for(lambda: len(lines) >= count, PATIENCE_S)
        return lines

    monkeypatch.setattr(waiting, "PATIENCE_S", 0.0)
    monkeypatch.setattr(waiting, "say", say)
    return wait_for


class TestTold:
    def test_each_state_is_said_once(self, said):
        """
        Silence, the queue, what blocks the server and the prompt are each said once, however often they come.
        """

        def events():
            said(1)
            yield STARTED
            said(2)
            for count, event in (
                (3, Queued(position=4)),
                (4, Queued(position=0, blocked_by=SUSPENDED)),
                (4, Queued(position=3)),
                (4, Queued(position=0, blocked_by=SUSPENDED)),
                (5, Scheduled(cached_tokens=0)),
                (5, Prefilled(done_tokens=3)),
                (6, Prefilled(done_tokens=3, blocked_by="its executor does not answer")),
            ):
                yield event
                said(count)
            yield DELTA

        assert 9 == len(list(waiting.told(events(), "box:1")))
        assert [
            "waiting: box:1 has not answered yet",
            "waiting: the server has accepted the request",
            "waiting: the request is queued, 4 are ahead",
            f"waiting: {SUSPENDED}",
            "waiting: the prompt is computed (9 tokens)",
            "waiting: its executor does not answer",
        ] == said(6)

    def test_output_that_comes_slowly_is_no_wait(self, said, monkeypatch):
        """
        Once there is output nothing is said, unless the server computes nothing.
        """

        def events():
            yield DELTA
            monkeypatch.setattr(waiting, "PATIENCE_S", 0.0)
            yield Queued(position=0, blocked_by=SUSPENDED)
            said(1)

        monkeypatch.setattr(waiting, "PATIENCE_S", PATIENCE_S)
        list(waiting.told(events(), "box:1"))

        assert [f"waiting: {SUSPENDED}"] == said(1)

    def test_end_of_the_stream_ends_the_watch(self):
        """
        No thread is left when the stream is over.
        """
        list(waiting.told([STARTED, DELTA], "box:1"))

        assert [] == [one for one in threading.enumerate() if one.name == "waits"]


class TestCommands:
    @pytest.mark.slow
    @pytest.mark.parametrize("command", ["generate", "chat"])
    def test_blocked_server_is_told_on_stderr(self, tandem, server, command):
        """
        While the server computes nothing the command says why, in the server's words, and goes on waiting.
        """
        server.play(Act(num_tokens=0, blocked_by=SUSPENDED, hang=True))
        prompt = ["hi"] if command == "generate" else []
        process = tandem(command, *prompt, "--address", server.address)
        process.stdin.write("hi\n")
        process.stdin.flush()
        while SUSPENDED not in (line := process.stderr.readline()):
            assert line
        process.send_signal(signal.SIGINT)
        assert server.seen.cancelled.wait(PATIENCE_S)

    @pytest.mark.slow
    def test_server_that_does_not_answer_is_named(self, tandem):
        """
        A server that accepts connections and says nothing is named by every kind of command.
        """
        with socket.create_server(("127.0.0.1", 0)) as silent:
            where = f"127.0.0.1:{silent.getsockname()[1]}"
            for command in (
                ["generate", "hi", "--address", where],
                ["chat", "--address", where],
                ["requests", "--admin-address", where],
                ["suspend", "--admin-address", where],
                ["top", "--admin-address", where],
                ["profile", "--admin-address", where],
                ["config", "advise", "--admin-address", where],
                ["bench", "serve", "--address", where],
            ):
                process = tandem(*command)
                assert f"[waiting: {where} has not answered yet]\n" == process.stderr.readline()

    def test_event_tells_what_blocks_the_server(self, server):
        """
        In the Python client each progress says why the server computes nothing.
        """
        server.play(Act(blocked_by=SUSPENDED))
        with Client(server.address) as client, client.generate("hi") as stream:
            events = list(stream)

        assert [SUSPENDED] == [one.blocked_by for one in events if isinstance(one, Queued)]
        assert ANSWER == "".join(one.text for one in events if isinstance(one, Delta))
