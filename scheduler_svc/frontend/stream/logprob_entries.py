"""Log probabilities as they come from the core: output tokens, and tokens of prompts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from scheduler_svc.ipc.messages import StreamLogprobs
from tandem.link.logprobs import LogprobColumns, TokenLogprob


def logprob_entries(logprobs: StreamLogprobs) -> Iterator[tuple[int, int, TokenLogprob]]:
    """Yield stream number, offset and log probabilities of each token; ranks of prompt tokens."""
    columns = LogprobColumns(
        row=np.empty(0, np.int32),
        chosen=np.frombuffer(logprobs.chosen, np.float32),
        top_start=np.frombuffer(logprobs.top_start, np.int32),
        top_token=np.frombuffer(logprobs.top_token, np.int32),
        top=np.frombuffer(logprobs.top, np.float32),
    )
    streams = memoryview(logprobs.stream).cast("I")
    offsets = memoryview(logprobs.offset).cast("i")
    if not logprobs.rank:
        yield from zip(streams, offsets, columns.entries(), strict=True)
        return
    ranks = memoryview(logprobs.rank).cast("i")
    for stream, offset, rank, entry in zip(streams, offsets, ranks, columns.entries(), strict=True):
        yield stream, offset, entry._replace(rank=rank)


class PromptScores:
    """
    Log probabilities of a prompt that were not taken yet. Their number is bounded when a request is
    accepted, so that they do not count for what may wait for a slow client.

    Attributes:
        is_complete: True once those of the prompt's last token came, or none are to come.
    """

    __slots__ = ("_entries", "is_complete")

    def __init__(self, *, is_complete: bool) -> None:
        self._entries: list[tuple[int, TokenLogprob]] = []
        self.is_complete = is_complete

    def put(self, offset: int, entry: TokenLogprob) -> None:
        """Add those of the prompt token at a negative offset from the prompt's end."""
        self._entries.append((offset, entry))
        self.is_complete = offset == -1

    def release(self) -> None:
        """Wait for no more, as the request ended."""
        self.is_complete = True

    def take(self) -> list[tuple[int, TokenLogprob]]:
        """Return and clear what came since the last call."""
        entries, self._entries = self._entries, []
        return entries
