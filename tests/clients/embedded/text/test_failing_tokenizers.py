"""An embedded engine whose tokenizer cannot turn one request's output into text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from tandem_embedded import ExecutionError, GenerationParams, SimpleTokenizer
from tests.clients.embedded.fake_backend import engine_and_runner, expected

EIGHT = GenerationParams(max_tokens=8)
STOPPED = GenerationParams(max_tokens=8, stop=("no such text",))
OUTPUT = expected("abc", 8)
BAD = OUTPUT[3]
"""A token of one request's output that the other one, "abcd", does not have."""


class BrokenTokenizer(SimpleTokenizer):
    """A tokenizer that fails where a certain token is to be decoded."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def decode(self, token_ids: Sequence[int]) -> str:
        if BAD in token_ids:
            raise self._error
        return super().decode(token_ids)


class FailsOnce(SimpleTokenizer):
    """A tokenizer that fails the first time that it decodes."""

    def __init__(self) -> None:
        self._has_failed = False

    def decode(self, token_ids: Sequence[int]) -> str:
        if not self._has_failed:
            self._has_failed = True
            raise RuntimeError("cannot decode")
        return super().decode(token_ids)


class InterruptedOnce(SimpleTokenizer):
    """A tokenizer in which Ctrl-C comes the first time that it decodes a certain token."""

    def __init__(self) -> None:
        self._has_come = False

    def decode(self, token_ids: Sequence[int]) -> str:
        if BAD in token_ids and not self._has_come:
            self._has_come = True
            raise KeyboardInterrupt
        return super().decode(token_ids)


class NeverBegins(SimpleTokenizer):
    """A tokenizer that makes no detokenizer for one prompt."""

    def detokenizer(self, prompt: Sequence[int]) -> None:
        raise KeyError("no detokenizer")


def turns(engine, count: int = 20) -> list:
    """Return what completes in so many steps: requests that are lost do not hang the test."""
    completed = [request for _ in range(count) for request in engine.step()]
    return sorted(completed, key=lambda request: request.request_id)


@pytest.mark.parametrize("error", [RuntimeError("cannot decode"), ValueError("cannot decode")])
@pytest.mark.parametrize("params", [EIGHT, STOPPED])
def test_only_the_request_without_a_text_fails(error, params):
    """
    A request whose output cannot be decoded, at its end or at a token, fails with INTERNAL and the
    tokenizer's error; the one beside it gets all of its tokens, and no step is computed again.
    """
    assert BAD not in expected("abcd", 8)
    engine, runner = engine_and_runner(tokenizer=BrokenTokenizer(error))
    engine.submit_request("abc", params)
    engine.submit_request("abcd", params)
    failed, other = turns(engine)
    assert isinstance(failed.error, ExecutionError)
    assert "INTERNAL" == failed.error.reason
    assert "cannot decode" in failed.error.message
    assert failed.choices[0].finish_reason is None
    assert OUTPUT[: len(failed.output_tokens)] == failed.output_tokens
    assert (None, expected("abcd", 8)) == (other.error, other.output_tokens)
    assert 0 == runner.num_resets
    assert not engine.has_pending_work()
    engine.check_integrity()


@pytest.mark.parametrize(
    ("params", "is_aborted"), [(EIGHT, False), (EIGHT, True), (STOPPED, False)]
)
def test_request_without_a_text_counts_as_failed(params, is_aborted):
    """
    A request whose output cannot be decoded, at its end, at an abort or at a token, counts as one
    that failed, and the one beside it as completed.
    """
    engine, _ = engine_and_runner(tokenizer=BrokenTokenizer(RuntimeError("cannot decode")))
    request_id = engine.submit_request("abc", params)
    engine.submit_request("abcd", params)
    if is_aborted:
        while len(engine.output_tokens(request_id)) < 7:
            engine.step()
        engine.abort(request_id)
    turns(engine)
    metrics = engine.get_metrics()
    assert (2, 1, 1) == (
        metrics.total_requests,
        metrics.completed_requests,
        metrics.failed_requests,
    )


def test_log_has_no_text_of_an_output():
    """
    The log tells the type of a tokenizer's error; its text, which may quote the output, is the
    caller's alone.
    """
    engine, _ = engine_and_runner(tokenizer=BrokenTokenizer(RuntimeError("secret")))
    with capture_logs() as logs:
        failed = engine.complete("abc", EIGHT)
    assert "secret" in failed.error.message
    assert ["RuntimeError"] == [line["error"] for line in logs]


def test_request_ends_where_its_text_does():
    """
    A request that is decoded as it goes on computes no token for nothing after one that fails.
    """
    engine, _ = engine_and_runner(tokenizer=BrokenTokenizer(RuntimeError("cannot decode")))
    engine.submit_request("abc", STOPPED)
    (failed,) = turns(engine)
    assert OUTPUT[:4] == failed.output_tokens
    assert SimpleTokenizer().decode(OUTPUT[:3]) == failed.output_text


def test_stream_tells_what_it_has_and_then_the_error():
    """
    A stream tells the text before a token that cannot be decoded, and then fails.
    """
    engine, _ = engine_and_runner(tokenizer=BrokenTokenizer(RuntimeError("cannot decode")))
    stream = engine.stream("abc", EIGHT)
    tokens = [token for _ in range(3) for token in next(stream).token_ids]
    assert OUTPUT[:3] == tokens
    with pytest.raises(ExecutionError, match="cannot decode"):
        next(stream)


def test_choice_without_a_text_fails_alone():
    """
    Of two choices the one that cannot be decoded fails, and the other one has its text.
    """
    engine, _ = engine_and_runner(tokenizer=FailsOnce())
    engine.submit_request("abc", GenerationParams(max_tokens=8, n=2))
    ((first, second),) = [request.choices for request in turns(engine)]
    assert "cannot decode" in first.error.message
    assert second.success
    assert SimpleTokenizer().decode(second.output_tokens) == second.output_text


def test_request_whose_text_cannot_begin_fails():
    """
    A request for whose output the tokenizer makes no detokenizer is accepted, and fails alone.
    """
    engine, runner = engine_and_runner(tokenizer=NeverBegins())
    engine.submit_request("abc", STOPPED)
    (failed,) = turns(engine)
    assert "no detokenizer" in failed.error.message
    assert 0 == runner.num_resets
    assert not engine.has_pending_work()


def test_text_that_cannot_end_keeps_no_engine_from_suspending():
    """
    A request that is over in a step before a suspension, and cannot be decoded, is delivered while
    the engine is suspended.
    """
    engine, runner = engine_and_runner(
        tokenizer=BrokenTokenizer(RuntimeError("cannot decode")), window=2
    )
    request_id = engine.submit_request("abc", EIGHT)
    while len(engine.output_tokens(request_id)) < 7:
        engine.step()
    engine.suspend()
    assert engine.is_suspended
    (failed,) = engine.step()
    assert "cannot decode" in failed.error.message
    engine.resume()
    assert expected("abcd", 8) == engine.complete("abcd", EIGHT).output_tokens
    assert 0 == runner.num_resets


@pytest.mark.parametrize("params", [EIGHT, STOPPED])
def test_interrupt_costs_the_request_that_it_meets_alone(params):
    """
    A run after one that Ctrl-C ended, at a token or at an end, returns: the request whose output was
    being recorded has failed, and the others have all of their tokens.
    """
    engine, _ = engine_and_runner(tokenizer=InterruptedOnce())
    engine.submit_request("abc", params)
    engine.submit_request("abcd", params)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    met, other = turns(engine)
    assert "INTERNAL" == met.error.reason
    assert (None, expected("abcd", 8)) == (other.error, other.output_tokens)
    assert not engine.has_pending_work()
    assert [] == engine.run()
