"""
Output processing of one choice: the tokens that may be sent, with exactly their text, and what was
sent before if the stream is resumed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.frontend.text.detokenizer import Detokenizer
from scheduler_svc.frontend.text.stop_strings import StopMatch, StopMatcher
from tandem.link.batch import Int32Column
from tandem.link.logprobs import TokenLogprob


class TokenBytes(NamedTuple):
    """
    Bytes that a token adds to the output, and those that each of the likeliest ids in its
    `TokenLogprob` would have added.
    """

    chosen: bytes
    top: list[bytes]


class OutputChunk(NamedTuple):
    """Tokens that are released together, with all of their text."""

    first_token_offset: int
    token_ids: list[int]
    text: str
    logprobs: Sequence[TokenLogprob] = ()
    """Logprobs of each token, if the tokens were pushed with them."""
    token_bytes: Sequence[TokenBytes] = ()
    """Bytes of each token, if the tokens were pushed with logprobs and their bytes are told."""


class OutputText:
    """
    Text of one output, with detokenizer and stop strings.

    A token is released once all of its text is certain and no part of it can be the beginning of a
    stop string that will be cut off. Once a stop string is complete, `stopped` is set and further
    tokens are ignored. Chunks have no gaps and no overlaps: their ids are the output's ids, their
    texts its text.

    Attributes:
        num_tokens: Number of output tokens so far, up to and including the one that ended it.
        stopped: Stop string that ended the output, if one did.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stops: Sequence[str],
        end_token_ids: frozenset[int],
        min_tokens: int = 0,
        tells_bytes: bool = False,
        includes_stop: bool = False,
    ) -> None:
        """
        Start one output.

        Args:
            detokenizer: Detokenizer that has taken no token of this output.
            stops: Stop strings, none empty.
            end_token_ids: Tokens that end the output and have no text in it.
            min_tokens: Number of first tokens with which a stop string may be complete without
                ending the output.
            includes_stop: True if the stop string that ends the output stays in its text.
            tells_bytes: True if the bytes of tokens are released with their logprobs.
        """
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops) if stops else None
        self._end_token_ids = end_token_ids
        self._min_tokens = min_tokens
        self._tells_bytes = tells_bytes
        self._includes_stop = includes_stop
        self._ids: list[int] = []  # not yet released
        self._logprobs: list[TokenLogprob] = []  # of `_ids`, or none
        self._bytes: list[TokenBytes] = []  # of `_ids`, or none
        self._text = ""  # certain, not yet released
        self._num_released_tokens = 0
        self._num_released_chars = 0
        self._boundaries: deque[tuple[int, int]] = deque()  # (tokens, chars) where both end
        self.num_tokens = 0
        self.stopped: StopMatch | None = None

    def go_on_after(self, token_ids: Sequence[int]) -> None:
        """
        Take tokens that the client has already, with all of their text.

        Half a code point at their end becomes text only if the next token completes it; else its
        U+FFFD was sent with them. A stop string in them sets `stopped`, which the caller checks.
        """
        for token_id in token_ids:
            self.push(token_id)
        self._num_released_tokens = self.num_tokens
        self._ids.clear()
        self._boundaries.clear()
        self._count_text_as_sent()

    def push_all(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens; those after a stop string are ignored."""
        if not self._try_push_plain(token_ids):
            for token_id in token_ids:
                self.push(token_id)

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> None:
        """
        Take the next token; it is ignored after a stop string. Either every token has its logprobs,
        or none has.
        """
        if self.stopped is not None:
            return
        self._ids.append(token_id)
        if logprob is not None:
            self._logprobs.append(logprob)
            if self._tells_bytes:
                top = [self._bytes_of(one) for one in logprob.top_token_ids]
                self._bytes.append(TokenBytes(self._bytes_of(token_id), top))
        self.num_tokens += 1
        if token_id in self._end_token_ids:
            self._grow(self._detokenizer.flush(), self.num_tokens - 1)
            self._mark(self.num_tokens)
            return
        decoded = self._detokenizer.push(token_id)
        if decoded.head is not None:
            num_before = self.num_tokens - 1
            self._grow(decoded.head, num_before)
            if num_before == self._num_released_tokens:
                self._count_text_as_sent()
            else:
                self._mark(num_before)
        self._grow(decoded.text, self.num_tokens)
        if decoded.clean:
            self._mark(self.num_tokens)

    def take(self) -> OutputChunk | None:
        """Release all tokens that can be released; return None if there are none."""
        releasable = self._num_released_chars + len(self._text)
        if self._matcher is not None and self.stopped is None and not self._includes_stop:
            releasable -= self._matcher.num_held_chars
        boundary = None
        while self._boundaries and self._boundaries[0][1] <= releasable:
            boundary = self._boundaries.popleft()
        chunk = None if boundary is None else self._release(*boundary)
        # A stop string that began in text the client has may leave an empty chunk.
        return chunk if chunk is not None and (chunk.token_ids or chunk.text) else None

    def finish(self) -> OutputChunk | None:
        """End the output and release the rest, which may complete a stop string; None if empty."""
        if self.stopped is None:
            self._grow(self._detokenizer.flush(), self.num_tokens)
            if self.num_tokens == self._num_released_tokens:
                self._count_text_as_sent()
        self._boundaries.clear()
        if not self._ids and not self._text:
            return None
        return self._release(self.num_tokens, self._num_released_chars + len(self._text))

    def _try_push_plain(self, token_ids: Sequence[int]) -> bool:
        """
        Take tokens together if no text is held back before or after them: no half code point, no
        beginning of a stop string, no end token. Otherwise take none and return False.
        """
        if self._ids or self._text or self.stopped is not None or not token_ids:
            return False
        if not self._end_token_ids.isdisjoint(token_ids):
            return False
        text = self._detokenizer.plain_text(token_ids)
        if text is None or not (self._matcher is None or self._matcher.try_skip(text)):
            return False
        self._ids += token_ids
        self._text = text
        self.num_tokens += len(token_ids)
        self._mark(self.num_tokens)
        return True

    def _bytes_of(self, token_id: int) -> bytes:
        return b"" if token_id in self._end_token_ids else self._detokenizer.bytes_of(token_id)

    def _grow(self, text: str, num_tokens: int) -> None:
        """Add text that became certain with token number `num_tokens`."""
        if not text or self.stopped is not None:
            return
        self._text += text
        if self._matcher is None:
            return
        match = self._matcher.feed(text, may_match=num_tokens > self._min_tokens)
        if match is None:
            return
        self.stopped = match
        # Rounding can bring a stop string that begins in text which an earlier stream sent.
        end = max(match.end if self._includes_stop else match.start, self._num_released_chars)
        self._text = self._text[: end - self._num_released_chars]
        self.num_tokens = num_tokens
        del self._ids[num_tokens - self._num_released_tokens :]
        del self._logprobs[num_tokens - self._num_released_tokens :]
        del self._bytes[num_tokens - self._num_released_tokens :]
        self._boundaries.clear()
        self._boundaries.append((num_tokens, end))

    def _mark(self, num_tokens: int) -> None:
        if self.stopped is None:
            boundary = (num_tokens, self._num_released_chars + len(self._text))
            self._boundaries.append(boundary)

    def _count_text_as_sent(self) -> None:
        """Count the text that is not released as sent by an earlier stream."""
        self._num_released_chars += len(self._text)
        self._text = ""

    def _release(self, num_tokens: int, num_chars: int) -> OutputChunk:
        tokens = num_tokens - self._num_released_tokens
        chars = num_chars - self._num_released_chars
        chunk = OutputChunk(
            first_token_offset=self._num_released_tokens,
            token_ids=self._ids[:tokens],
            text=self._text[:chars],
            logprobs=self._logprobs[:tokens],
            token_bytes=self._bytes[:tokens],
        )
        del self._ids[:tokens]
        del self._logprobs[:tokens]
        del self._bytes[:tokens]
        self._text = self._text[chars:]
        self._num_released_tokens, self._num_released_chars = num_tokens, num_chars
        return chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """
    Output of one choice that the client holds.

    Attributes:
        token_ids: Output ids that were sent, shape ``[N]``.
        is_finished: True if the client has the choice's Finished too.
        path: Field path of its entry in the request; empty if there is none.
    """

    token_ids: Int32Column
    is_finished: bool = False
    path: str = ""


NOTHING_BEFORE = Prior(token_ids=np.empty(0, np.int32))


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorEnd:
    """End of a choice at the last id that the client holds."""

    reason: FinishReason
    matched_token: int | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class ChoiceStart:
    """
    Start of the stream of one choice.

    Attributes:
        output: Output processing of the choice, which has taken the ids sent before.
        prior: Output that was sent before.
        end: End of the choice at the last of these ids, which the client is still to be told.
    """

    output: OutputText
    prior: Prior = NOTHING_BEFORE
    end: PriorEnd | None = None

    @property
    def is_over(self) -> bool:
        """True if no token is left to compute."""
        return self.prior.is_finished or self.end is not None
