"""Streams that go on until they are left, with the time at which each of their tokens came."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tandem.errors import TandemError
from tandem_client import NO_RETRY, Client, Delta
from tests.waiting import LIMIT_S, wait_until

_PROMPT_LEN = (8, 200)
_SMALLEST_VOCABULARY = 256


@dataclass(slots=True, eq=False)
class LiveStream:
    """
    One request that never fails silently.

    Attributes:
        number: Number of the request, from which its prompt and its parameters follow.
        max_tokens: Tokens at which it would end by itself.
        tokens: Tokens that came until now.
        came_s: Time of each.
        problem: Error that ended it.
    """

    number: int
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)
    problem: str | None = None

    def read(self, address: str, is_left: threading.Event) -> None:
        """Read the stream until it ends, fails or is left."""
        source = random.Random(self.number)
        prompt = [
            source.randrange(_SMALLEST_VOCABULARY) for _ in range(source.randint(*_PROMPT_LEN))
        ]
        try:
            with (
                Client(address, retry=NO_RETRY) as client,
                client.generate(
                    token_ids=prompt,
                    max_tokens=self.max_tokens,
                    ignore_eos=True,
                    seed=self.number,
                    temperature=float(self.number % 2),  # every other one is greedy
                ) as stream,
            ):
                for event in stream:
                    if isinstance(event, Delta):
                        assert len(self.tokens) == event.first_token_offset, "a gap in the offsets"
                        self.came_s += [time.monotonic()] * len(event.token_ids)
                        self.tokens += event.token_ids
                    if is_left.is_set():
                        break
        except (TandemError, AssertionError) as error:
            self.problem = f"{type(error).__name__}: {error}"


class LiveStreams:
    """
    Streams of one server, each read by a thread of its own.

    Attributes:
        streams: The streams, by number.
    """

    def __init__(self, address: str, max_tokens: Sequence[int]) -> None:
        """Start a stream for each number of tokens."""
        self.streams = [LiveStream(number, most) for number, most in enumerate(max_tokens)]
        self._is_left = threading.Event()
        self._threads = [
            threading.Thread(target=stream.read, args=(address, self._is_left), daemon=True)
            for stream in self.streams
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_failed(self) -> int:
        """Number of streams that an error ended."""
        return sum(stream.problem is not None for stream in self.streams)

    def wait_for_more(self, num_tokens: int) -> None:
        """
        Wait until each stream that has not failed has so many more tokens than now.

        Raises:
            SystemExit: A stream was over before, or all have failed.
        """
        wanted = {stream.number: len(stream.tokens) + num_tokens for stream in self.streams}

        def has_come() -> bool:
            going = [stream for stream in self.streams if stream.problem is None]
            if not going or any(len(stream.tokens) >= stream.max_tokens for stream in going):
                raise SystemExit("the streams were over before the last kill")
            return all(len(stream.tokens) >= wanted[stream.number] for stream in going)

        wait_until(has_come, f"{num_tokens} more tokens of each stream")

    def leave(self) -> list[LiveStream]:
        """Leave all streams, and return them."""
        self._is_left.set()
        return self.finish()

    def finish(self) -> list[LiveStream]:
        """Wait for the end of all streams, and return them."""
        for thread in self._threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), "a stream does not end"
        return self.streams


def went_on_s(came_s: Sequence[float], since_s: float) -> float | None:
    """
    Return the seconds from a kill until a stream went on: until the end of its longest pause from
    the last token before the kill on. Tokens that were already on their way come before that pause.
    None where nothing came after the kill.

    Args:
        came_s: Times of the stream's tokens, at least one of them before the kill.
        since_s: Time of the kill.
    """
    before = [at_s for at_s in came_s if at_s < since_s]
    times = [*before[-1:], *(at_s for at_s in came_s if at_s >= since_s)]
    pauses = [(end_s - begin_s, end_s) for begin_s, end_s in pairwise(times)]
    return max(pauses)[1] - since_s if pauses else None


def num_different(found: Sequence[LiveStream], expected: Sequence[LiveStream]) -> int:
    """Return the number of streams whose tokens are not the first ones of those expected."""
    return sum(
        stream.tokens != other.tokens[: len(stream.tokens)]
        for stream, other in zip(found, expected, strict=True)
    )
