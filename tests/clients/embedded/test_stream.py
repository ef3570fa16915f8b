"""A stream with a request that another thread's steps end, between any two looks at it."""

from __future__ import annotations

import time
from collections import deque

import pytest

from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.frontend.text.output import OutputChunk
from tandem_embedded import SchedulerError, TextStream
from tandem_embedded.ledger import Delivery
from tandem_embedded.results import CompletedChoice, CompletedRequest
from tests.clients.embedded.fake_backend import engine_and_runner


def done() -> CompletedRequest:
    choice = CompletedChoice(
        output_text="x", output_tokens=[7], finish_reason=FinishReason.MAX_TOKENS, error=None
    )
    return CompletedRequest(
        request_id=0,
        choices=(choice,),
        num_prompt_tokens=1,
        num_truncated_tokens=0,
        num_cached_tokens=0,
        seed=0,
    )


class _EndsAfterALook(deque):
    """Deque that is empty at the first look; then the last piece and the result arrive."""

    def __init__(self, delivery: Delivery, chunk: OutputChunk) -> None:
        super().__init__()
        self._coming = [chunk]
        self._delivery = delivery

    def __bool__(self) -> bool:
        found = len(self) > 0
        if self._coming:
            self.append((0, self._coming.pop()))
            self._delivery.result = done()
        return found


class TestOtherThreads:
    def test_the_last_piece_is_told_before_the_end(self):
        """
        A piece that comes together with the result, just after a look for pieces, is not lost.
        """
        delivery = Delivery(is_streamed=True)
        delivery.chunks = _EndsAfterALook(delivery, OutputChunk(0, [7], "x"))
        stream = TextStream(0, delivery, drive=pytest.fail, abort=pytest.fail)
        assert ["x"] == [piece.text for piece in stream]

    def test_leaving_a_request_that_has_just_ended_is_no_error(self):
        """
        A request that ends between the look at it and the abort needs none.
        """
        delivery = Delivery(is_streamed=True)

        def abort(request_id: int) -> None:
            delivery.result = done()
            raise SchedulerError("no such request", reason="REQUEST_NOT_FOUND")

        TextStream(0, delivery, drive=pytest.fail, abort=abort).close()
        assert delivery.result is not None

    def test_an_abort_that_fails_otherwise_is_told(self):
        """
        While the request has no result an abort's error is raised.
        """

        def abort(request_id: int) -> None:
            raise SchedulerError("no such request", reason="REQUEST_NOT_FOUND")

        stream = TextStream(0, Delivery(is_streamed=True), drive=pytest.fail, abort=abort)
        with pytest.raises(SchedulerError):
            stream.close()

    def test_request_that_is_over_in_the_core_alone_is_not_gone(self):
        """
        Between the end of a request in the core and its record another thread finds that work is
        pending and no live request, and may leave its stream.
        """
        engine, _ = engine_and_runner()
        stream = engine.stream("abc")
        request_id = engine.submit_request("abcd")
        for over in (stream.request_id, request_id):
            engine._core.end_request(str(over), FinishReason.CANCELLED, time.monotonic())
        assert engine.has_pending_work()
        with pytest.raises(SchedulerError, match="no live request"):
            engine.get_request(request_id)
        stream.close()
        assert [request_id] == [request.request_id for request in engine.run()]
