"""Form of an answer, as the server writes it without knowing which endpoint it is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from tandem_openai_gateway.answers.output import WholeOutput
from tandem_openai_gateway.errors import ErrorAnswer
from tandem_openai_gateway.upstream import Delta, Finished, Usage

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """
    Facts that every part of an answer repeats.

    Attributes:
        request_id: Id of the request, at Tandem too.
        created_s: Time of the answer in seconds since 1970.
        model: Name of the model.
        fingerprint: Revision of the model.
    """

    request_id: str
    created_s: int
    model: str
    fingerprint: str


class AnswerFormat(Protocol):
    """Form of the answer to one request; a stream calls the methods in the order given here."""

    def whole(self, output: WholeOutput) -> msgspec.Struct:
        """Return the body of an answer that is not streamed."""

    def opening(self) -> bytes:
        """Return the events before the first output."""

    def delta(self, place: int, delta: Delta) -> bytes:
        """Return the event for new output of the prompt with this number."""

    def finished(self, place: int, finished: Finished) -> bytes:
        """Return the event for the end of a choice."""

    def closing(self, usages: Sequence[Usage]) -> bytes:
        """Return the last events, given the usage of each prompt."""

    def failed(self, error: ErrorAnswer) -> bytes:
        """Return the last event of a stream that failed, given the error's body."""


def data_event(body: msgspec.Struct) -> bytes:
    """Return a server-sent event without a name."""
    return b"data: " + _encode(body) + b"\n\n"


def named_event(name: str, body: msgspec.Struct) -> bytes:
    """Return a server-sent event with a name."""
    return b"event: " + name.encode() + b"\n" + data_event(body)


def comment(text: str) -> bytes:
    """Return a comment, which clients skip; it keeps a connection from being closed as idle."""
    return b": " + text.replace("\n", " ").encode() + b"\n\n"
