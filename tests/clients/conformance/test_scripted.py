"""Answers of a scripted server that streams.json has no place for, read by the program of every client."""

from __future__ import annotations

import itertools
import socket

import pytest

from tandem.errors import ERROR_BY_REASON
from tests.clients.conformance.scripted_server import scripted_server
from tests.waiting import wait_until

OVER_4_MIB = "x" * (5 << 20)
ACCEPTED = {"started": {"request_id": "r", "prompt_tokens": 1, "model_revision": "m"}}
REFUSED = {
    "code": "UNAVAILABLE",
    "reason": "NO_EXECUTOR",
    "message": "none",
    "retry_after_ms": 60000,
}


class TestErrors:
    @pytest.mark.slow
    def test_every_reason_comes_with_its_details(self, player, record):
        """
        Each reason, and one that no client knows, is told with its code, field, metadata and advice.
        """
        codes = {reason: error.code for reason, error in ERROR_BY_REASON.items()}
        codes["NOT_YET_KNOWN"] = "FAILED_PRECONDITION"
        with record.of(player, "every-error"):
            for reason, code in codes.items():
                end = {
                    "code": code,
                    "reason": reason,
                    "message": f"A sentence about {reason}.",
                    "metadata": {"limit": "max_num_seqs"},
                    "field": "sampling.top_p",
                    "retry_after_ms": 1500,
                }
                with scripted_server([{"send": [], "end": end}]) as script:
                    result = player.ask(
                        do="generate",
                        targets=[script.address],
                        retry="none",
                        request={"text": "hi"},
                    )
                wanted = {**end, "known": reason != "NOT_YET_KNOWN"}
                assert wanted == {key: result["error"][key] for key in wanted}
                assert [] == result["choices"]


class TestLargeAnswers:
    def test_delta_over_4_mib_arrives(self, player, record):
        """
        A message over 4 MiB, the limit of gRPC's own libraries, arrives.
        """
        call = {
            "send": [
                ACCEPTED,
                {"delta": {"token_ids": [1], "text": OVER_4_MIB}},
                {"finished": {"reason": "FINISH_REASON_EOS"}},
                {"done": {"usage": {"output_tokens": 1}}},
            ]
        }
        with record.of(player, "delta-over-4-mib"), scripted_server([call]) as script:
            targets, request = [script.address], {"text": "hi"}
            result = player.ask(do="generate", targets=targets, retry="soon", request=request)
            assert "error" not in result
            assert [OVER_4_MIB] == [one["text"] for one in result["choices"]]

    def test_answer_over_4_mib_arrives(self, player, record):
        """
        A whole answer over 4 MiB arrives.
        """
        choice = {"token_ids": [1], "text": OVER_4_MIB, "reason": "FINISH_REASON_EOS"}
        answer = {
            **ACCEPTED,
            "completions": [choice],
            "done": {"usage": {"output_tokens": 1}},
        }
        call = {"send": [], "answer": answer}
        with record.of(player, "answer-over-4-mib"), scripted_server([call]) as script:
            targets, request = [script.address], {"text": "hi"}
            result = player.ask(do="complete", targets=targets, retry="soon", request=request)
            assert "error" not in result
            assert [OVER_4_MIB] == [one["text"] for one in result["choices"]]


class TestConnections:
    @pytest.mark.slow
    def test_connection_that_nothing_answers_is_given_up(self, players, record):
        """
        A call fails with UNAVAILABLE where its connection is taken and nothing answers, without a
        deadline too.
        """
        with socket.create_server(("127.0.0.1", 0)) as server:
            command = {
                "targets": [f"127.0.0.1:{server.getsockname()[1]}"],
                "retry": "none",
                "keepalive_ms": 1000,
                "request": {"text": "hi"},
            }
            begun = [(one, one.begin(do="generate", **command)) for one in players.values()]
            for player, asked in begun:
                with record.of(player, "connection-without-an-answer"):
                    error = asked.result()["error"]
                    assert ("UNAVAILABLE", None) == (error["code"], error["reason"])


class TestCancel:
    def test_caller_who_leaves_between_attempts_makes_none_more(self, player, record):
        """
        A caller that leaves while its client waits to try again has its result at once.
        """
        calls = [{"send": [], "end": REFUSED}, {"send": [], "end": REFUSED}]
        with record.of(player, "cancel-between-attempts"), scripted_server(calls) as script:
            begun = player.begin(do="generate", targets=[script.address], request={"text": "hi"})
            wait_until(lambda: script.seen, "the first call")
            player.ask(do="cancel", command=begun.name)
            assert begun.result() == {"choices": []}
            assert 1 == len(script.seen)


class TestPrograms:
    def test_commands_run_at_the_same_time(self, player):
        """
        A command that waits holds no other up: a program can play many callers.
        """
        calls = [{"send": [ACCEPTED], "hang": True} for _ in range(4)]
        with scripted_server(calls) as script:
            begun = [
                player.begin(
                    do="generate", targets=[script.address], tell=True, request={"text": "hi"}
                )
                for _ in calls
            ]
            for one in begun:
                one.wait_for("started")
            for one in itertools.islice(begun, 2, 4):
                player.ask(do="cancel", command=one.name)
                assert [] == one.result()["choices"]
            for one in begun[:2]:
                player.ask(do="cancel", command=one.name)
                one.result()
