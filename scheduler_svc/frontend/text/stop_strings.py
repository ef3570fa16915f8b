"""Search for stop strings in text that arrives in pieces, without reading any of it twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatch:
    """First stop string that is complete; offsets count characters from the output's start."""

    stop: str
    start: int
    end: int


class _Pattern:
    """Knuth-Morris-Pratt automaton of one stop string."""

    __slots__ = ("_fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        """Length of the longest prefix of `stop` that is a suffix of the text so far."""
        fallback = [0] * len(stop)
        length = 0
        for at in range(1, len(stop)):
            while length and stop[at] != stop[length]:
                length = fallback[length - 1]
            if stop[at] == stop[length]:
                length += 1
            fallback[at] = length
        self._fallback = fallback

    def feed(self, text: str, *, may_match: bool) -> int | None:
        """
        Read the next text; return the offset in `text` just after the first complete match, or
        None. With `may_match` False, complete matches are skipped.
        """
        stop, length = self.stop, self.matched
        if not length and stop[0] not in text:
            return None
        for at, char in enumerate(text):
            while length and char != stop[length]:
                length = self._fallback[length - 1]
            if char == stop[length]:
                length += 1
                if length == len(stop):
                    if may_match:
                        return at + 1
                    length = self._fallback[length - 1]
        self.matched = length
        return None


class StopMatcher:
    """
    Matcher of several stop strings in one output.

    The stop string that is complete first wins; of several that are complete at the same character,
    the one that begins first. After a match no more text may be fed.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in dict.fromkeys(stops)]
        self._num_chars = 0

    @property
    def num_held_chars(self) -> int:
        """Length of the longest suffix of the text that may be the beginning of a stop string."""
        return max((pattern.matched for pattern in self._patterns), default=0)

    def try_skip(self, text: str) -> bool:
        """
        Read the next text if no stop string has begun before it and none can begin in it; otherwise
        read no text and return False.
        """
        for pattern in self._patterns:
            if pattern.matched or pattern.stop[0] in text:
                return False
        self._num_chars += len(text)
        return True

    def feed(self, text: str, *, may_match: bool = True) -> StopMatch | None:
        """
        Read the next text; return the match as soon as there is one.

        Args:
            text: The next text.
            may_match: False skips stop strings that are complete in `text`; one that only begins
                there may be completed by later text.
        """
        begin = self._num_chars
        self._num_chars += len(text)
        found: StopMatch | None = None
        for pattern in self._patterns:
            end = pattern.feed(text, may_match=may_match)
            if end is None:
                continue
            start = begin + end - len(pattern.stop)
            match = StopMatch(stop=pattern.stop, start=start, end=begin + end)
            if found is None or (match.end, match.start) < (found.end, found.start):
                found = match
        return found
