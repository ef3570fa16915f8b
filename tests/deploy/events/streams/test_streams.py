"""Streams are whole or failed, and the table tells of both."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.deploy.events.streams.callers import PYTHON, Access, HttpCaller, Received
from tests.deploy.events.streams.load import Load, Outcome
from tests.deploy.events.streams.prompts import REQUESTS
from tests.ports import free_port

OUTPUT = [4, 5, 6, 7]


class Answers:
    """A caller that gives one answer after another, and then the last one for ever."""

    name = PYTHON

    def __init__(self, answers: list[Received | Exception]) -> None:
        self.load: Load
        self._answers = answers

    def stream(self, _, heard) -> Received:
        heard()
        if len(self._answers) == 1:
            self.load.stop()
        answer = self._answers[0] if len(self._answers) == 1 else self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        pass


def outcome_of(
    answers: list[Received | Exception], monkeypatch, *, resumes: bool = False
) -> Outcome:
    """Return the outcome of the Python client when it gets some answers."""
    monkeypatch.setattr("tests.deploy.events.streams.load.ASK_AGAIN_S", 0.0)
    caller = Answers(answers)
    caller.load = Load([caller], dict.fromkeys(REQUESTS, OUTPUT), resumes=resumes)
    caller.load.start()
    return caller.load.end()[PYTHON]


def whole() -> Received:
    return Received(token_ids=list(OUTPUT), request_id="whole")


class TestLoad:
    def test_whole_streams_are_finished(self, monkeypatch):
        """
        A stream with the tokens of an undisturbed one counts as finished.
        """
        found = outcome_of([whole(), whole()], monkeypatch)
        assert (2, []) == (found.finished, found.failures)

    @pytest.mark.parametrize(
        ("token_ids", "at"),
        [([4, 5, 6], 3), ([4, 6, 7], 1), ([4, 5, 5, 6, 7], 2), ([4, 5, 6, 7, 8], 4)],
        ids=["end is missing", "token is missing", "token comes twice", "token too many"],
    )
    def test_stream_with_other_tokens_fails(self, monkeypatch, token_ids, at):
        """
        A stream that ends without an error and has other tokens fails, and the first one is told.
        """
        bad = Received(token_ids=token_ids, request_id="bad")
        found = outcome_of([bad, whole()], monkeypatch)
        (failure,) = found.failures
        assert 1 == found.finished
        assert f"token {at} of 4 is not that of an undisturbed stream" in str(failure)
        assert f"{PYTHON}, stream 0 (bad)" in str(failure)

    def test_request_that_no_scheduler_took_is_asked_again(self, monkeypatch):
        """
        Clients that outlive a scheduler ask again where none is there; others have failed then.
        """
        refused = Received(error="connection refused", code="UNAVAILABLE")
        patient = outcome_of([refused, whole()], monkeypatch, resumes=True)
        assert (1, []) == (patient.finished, patient.failures)
        strict = outcome_of([refused, whole()], monkeypatch)
        assert (1, 1) == (strict.finished, len(strict.failures))

    def test_stream_that_broke_is_not_asked_again(self, monkeypatch):
        """
        A stream that a scheduler had accepted fails where it breaks, also for patient clients.
        """
        broken = Received(token_ids=[4], request_id="one", error="reset", code="UNAVAILABLE")
        found = outcome_of([broken, whole()], monkeypatch, resumes=True)
        assert ["after 1 tokens: reset"] == [one.error for one in found.failures]

    def test_error_that_no_caller_expects_is_a_failure_with_its_text(self, monkeypatch):
        """
        A thread that an exception ends leaves a failure that names it.
        """
        found = outcome_of([whole(), KeyError("x-request-id")], monkeypatch)
        assert 1 == found.finished
        assert ["KeyError: 'x-request-id'"] == [one.error for one in found.failures]

    def test_streams_run_when_every_thread_has_tokens(self):
        """
        Waiting ends when all streams have tokens, and counts them by client.
        """
        may_end = threading.Event()

        class Long(Answers):
            def stream(self, _, heard) -> Received:
                heard()
                may_end.wait()
                return whole()

        load = Load([Long([]), Long([])], dict.fromkeys(REQUESTS, OUTPUT))
        load.start()
        load.wait_until_running()
        load.stop()
        may_end.set()
        assert 2 == load.end()[PYTHON].running


class Gateway(BaseHTTPRequestHandler):
    """A gateway whose streams have one event with all tokens."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("x-request-id", "one")
        self.end_headers()
        event = json.dumps({"choices": [{"token_ids": OUTPUT}]})
        self.wfile.write(f"data: {event}\n\ndata: [DONE]\n\n".encode())

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def gateway():
    """Yield the address of a gateway that serves."""
    server = HTTPServer(("127.0.0.1", 0), Gateway)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


class TestHttpCaller:
    @pytest.mark.parametrize("fails_over", [True, False])
    def test_only_caller_that_fails_over_asks_the_next_gateway(self, gateway, fails_over):
        """
        Where nothing listens at a gateway, the stream comes from the next one, or fails without one.
        """
        gone = f"127.0.0.1:{free_port()}"
        caller = HttpCaller(Access(scheduler=""), (gone, gateway) if fails_over else (gone,))
        received = caller.stream(REQUESTS[0], lambda: None)
        caller.close()
        if fails_over:
            assert (OUTPUT, "", "one") == (received.token_ids, received.error, received.request_id)
        else:
            assert "connect" == received.code
            assert received.may_ask_again
