"""Stream of the text of one request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Self

from tandem_embedded.errors import EngineError, SchedulerError
from tandem_embedded.ledger import Delivery
from tandem_embedded.results import CompletedRequest


class TextPiece(NamedTuple):
    """Tokens of one choice that are delivered together, and all of their text."""

    text: str
    token_ids: list[int]
    choice: int


class TextStream:
    """
    Pieces of one request's output, in order; the texts of a choice add up to its whole text.

    The thread that takes a piece drives the engine until there is one. Abandoning the stream, by
    `close` or the end of a `with`, aborts the request.

    Attributes:
        request_id: Id of the request in the engine.
    """

    def __init__(
        self,
        request_id: int,
        delivery: Delivery,
        *,
        drive: Callable[[], None],
        abort: Callable[[int], None],
    ) -> None:
        """
        Create the stream of a submitted request; callers use `InferenceEngine.stream`.

        Args:
            request_id: Id of the request in the engine.
            delivery: Receiver of the request's output.
            drive: Function that computes one step.
            abort: Function that ends a request.
        """
        self.request_id = request_id
        self._delivery = delivery
        self._drive = drive
        self._abort = abort

    @property
    def result(self) -> CompletedRequest | None:
        """Completed request; None before its end."""
        return self._delivery.result

    def wait(self) -> CompletedRequest:
        """Drive the engine until the request is over, and return it."""
        while (result := self._delivery.result) is None:
            self._drive()
        return result

    def close(self) -> None:
        """Abort the request unless it is over."""
        if self._delivery.result is not None:
            return
        try:
            self._abort(self.request_id)
        except SchedulerError:
            if self._delivery.result is None:  # else another thread's step has just ended it
                raise

    def __iter__(self) -> Iterator[TextPiece]:
        return self

    def __next__(self) -> TextPiece:
        """
        Take the next piece.

        Raises:
            EngineError: The request failed; its output before that was delivered.
        """
        delivery = self._delivery
        while not delivery.chunks:
            result = delivery.result
            if result is None:
                self._drive()
            elif not delivery.chunks:  # else another thread's step added chunks before the result
                if result.error is not None:
                    raise result.error
                raise StopIteration
        choice, chunk = delivery.chunks.popleft()
        return TextPiece(chunk.text, chunk.token_ids, choice)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: object, _traceback: object
    ) -> None:
        try:
            self.close()
        except EngineError:
            if kind is None:  # else an engine that has stopped would hide why it did
                raise
