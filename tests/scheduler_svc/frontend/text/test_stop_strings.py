"""Search for stop strings in text that arrives in pieces."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from scheduler_svc.frontend.text.stop_strings import StopMatch, StopMatcher

PIECES = st.lists(st.text("abc", max_size=4), max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


def first_match(text: str, stops: list[str]) -> StopMatch | None:
    """Return the match by definition: earliest end, then earliest start."""
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not ends:
        return None
    end, start, stop = min(ends)
    return StopMatch(stop=stop, start=start, end=end)


def held_chars(text: str, stops: list[str]) -> int:
    """
    Return the length, by definition, of the longest end of the text that begins a stop string.
    """
    lengths = [
        length for stop in stops for length in range(1, len(stop)) if text.endswith(stop[:length])
    ]
    return max(lengths, default=0)


class TestStopMatcher:
    @settings(max_examples=200, deadline=None)
    @given(pieces=PIECES, stops=STOPS)
    def test_any_cut_finds_what_the_whole_text_has(self, pieces, stops):
        """
        The match and the held end are those of the text as a whole, however it is cut.
        """
        matcher, text = StopMatcher(stops), ""
        for piece in pieces:
            text += piece
            found = matcher.feed(piece)
            assert first_match(text, stops) == found
            if found is not None:
                break
            assert held_chars(text, stops) == matcher.num_held_chars

    def test_no_stop_string_holds_nothing(self):
        """
        A matcher without stop strings holds and finds nothing.
        """
        matcher = StopMatcher([])
        assert matcher.feed("anything") is None
        assert 0 == matcher.num_held_chars

    @pytest.mark.parametrize("stops", [["def", "cdef"], ["cdef", "def"]])
    def test_same_end_takes_the_longer_one(self, stops):
        """
        The stop string that begins first wins over another that ends at the same place, in either
        order.
        """
        assert StopMatch(stop="cdef", start=2, end=6) == StopMatcher(stops).feed("abcdefg")

    def test_hostile_stop_string_costs_linear_time(self):
        """
        Text that nearly matches a long repetitive stop string is read once, not once per character.
        """
        stop = "a" * 1023 + "b"
        matcher = StopMatcher([stop])
        for _ in range(200):
            assert matcher.feed("a" * 1023) is None
        assert 1023 == matcher.num_held_chars
        found = matcher.feed("b")
        assert (200 * 1023 - 1023, 200 * 1023 + 1) == (found.start, found.end)
