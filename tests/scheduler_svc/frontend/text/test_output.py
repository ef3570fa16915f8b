"""Release of tokens together with their text."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from scheduler_svc.frontend.text.detokenizer import ByteDetokenizer, BytePiece
from scheduler_svc.frontend.text.output import OutputText

EOS = 99


def output_of(
    pieces: list[bytes],
    stops: tuple[str, ...] = (),
    end_token_ids: frozenset[int] = frozenset(),
    *,
    includes_stop: bool = False,
) -> OutputText:
    vocabulary = {at: BytePiece.of(raw) for at, raw in enumerate(pieces)}
    detokenizer = ByteDetokenizer(vocabulary | {EOS: BytePiece.of(b"<eos>")})
    ends = frozenset() if includes_stop else end_token_ids | {EOS}
    return OutputText(detokenizer, stops=stops, end_token_ids=ends, includes_stop=includes_stop)


def run(output: OutputText, ids: list[int]) -> list[tuple[int, list[int], str]]:
    """Return the chunks of an output that gets its tokens one by one."""
    chunks = []
    for token_id in ids:
        output.push(token_id)
        chunks.append(output.take())
    chunks.append(output.finish())
    return [(c.first_token_offset, c.token_ids, c.text) for c in chunks if c is not None]


class TestRelease:
    def test_certain_text_is_released_at_once(self):
        """
        Tokens of whole characters are released one by one, with their offsets.
        """
        assert [(0, [0], "ab"), (1, [1], "c")] == run(output_of([b"ab", b"c"]), [0, 1])

    def test_half_character_is_released_with_its_other_half(self):
        """
        Tokens that share a code point are released together.
        """
        assert [(0, [0, 1], "a€")] == run(output_of([b"a\xe2", b"\x82\xac"]), [0, 1])

    def test_unfinished_character_is_released_by_the_end(self):
        """
        Bytes that never became valid are U+FFFD, released with their token when the output ends.
        """
        assert [(0, [0], "a\ufffd")] == run(output_of([b"a\xe2"]), [0])

    def test_eos_is_counted_and_has_no_text(self):
        """
        The ending token is the last id, has no text, and comes after the text of unfinished bytes.
        """
        output = output_of([b"a", b"\xe2"])
        assert [(0, [0], "a"), (1, [1, EOS], "\ufffd")] == run(output, [0, 1, EOS])
        assert 3 == output.num_tokens


class TestStop:
    def test_possible_beginning_is_held_until_it_is_none(self):
        """
        A token that may begin a stop string waits until its text no longer can.
        """
        output = output_of([b"x", b"\n", b"y"], stops=("\n\n",))
        assert [(0, [0], "x"), (1, [1, 2], "\ny")] == run(output, [0, 1, 2])

    def test_stop_across_tokens_cuts_before_it(self):
        """
        Text ends before the stop string; ids and count end with the token that completed it.
        """
        output = output_of([b"one E", b"N", b"D two", b"more"], stops=("END",))
        assert [(0, [0, 1, 2], "one ")] == run(output, [0, 1, 2, 3])
        assert (3, "END") == (output.num_tokens, output.stopped.stop)

    def test_tokens_after_the_stop_are_ignored(self):
        """
        Tokens computed ahead of a stop string have no effect.
        """
        output = output_of([b"a.", b"b."], stops=(".",))
        for token_id in (0, 1, 1, EOS):
            output.push(token_id)
        chunk = output.take()
        assert (1, [0], "a") == (output.num_tokens, chunk.token_ids, chunk.text)
        assert output.finish() is None

    def test_stop_in_the_same_token_as_half_a_character_ends_with_that_token(self):
        """
        The token that completes the stop string counts, though its text goes on with half a
        character.
        """
        output = output_of([b"a.\xe2", b"\x82\xac"], stops=(".",))
        assert [(0, [0], "a")] == run(output, [0, 1])
        assert 1 == output.num_tokens

    def test_stop_completed_by_what_an_eos_leaves_wins_over_the_eos(self):
        """
        A stop string completed one token before the EOS wins, since it has the smaller offset.
        """
        output = output_of([b"a", b"\xe2"], stops=("\ufffd",))
        assert [(0, [0], "a"), (1, [1], "")] == run(output, [0, 1, EOS])
        assert 2 == output.num_tokens

    def test_stop_completed_by_the_end_is_still_found(self):
        """
        Text that becomes certain only at the end can complete a stop string.
        """
        output = output_of([b"a\xe2"], stops=("a\ufffd",))
        assert [(0, [0], "")] == run(output, [0])
        assert "a\ufffd" == output.stopped.stop


class TestIncludedStop:
    def test_stop_string_stays_and_nothing_is_held_for_it(self):
        """
        Text ends with the stop string, and its possible beginning is released at once; ids and
        count are those of an output that is cut before it.
        """
        output = output_of([b"one E", b"N", b"D two", b"more"], ("END",), includes_stop=True)
        assert [(0, [0], "one E"), (1, [1], "N"), (2, [2], "D")] == run(output, [0, 1, 2, 3])
        assert (3, "END") == (output.num_tokens, output.stopped.stop)

    def test_token_that_ends_the_output_has_its_text(self):
        """
        The text of the token that ends the output is part of it.
        """
        output = output_of([b"a"], includes_stop=True)
        assert [(0, [0], "a"), (1, [EOS], "<eos>")] == run(output, [0, EOS])

    @settings(max_examples=200, deadline=None)
    @given(
        pieces=st.lists(st.text("ab\n€", max_size=3).map(str.encode), min_size=1, max_size=12),
        stops=st.lists(st.text("ab\n€", min_size=1, max_size=3), min_size=1, max_size=3),
    )
    def test_it_differs_from_a_cut_one_by_the_stop_string_alone(self, pieces, stops):
        """
        Of the same tokens, the text with the stop string is the one without it and then the stop
        string; ids and the string that matched are the same.
        """
        cut, whole = (
            output_of(pieces, tuple(stops), includes_stop=includes) for includes in (False, True)
        )
        before, after = (run(one, list(range(len(pieces)))) for one in (cut, whole))
        text = "".join(text for *_, text in before)
        assert cut.stopped == whole.stopped
        assert text + (cut.stopped.stop if cut.stopped else "") == "".join(t for *_, t in after)
        assert [i for _, ids, _ in before for i in ids] == [i for _, ids, _ in after for i in ids]


class TestGoingOn:
    def test_half_character_is_completed_with_the_next_token(self):
        """
        A code point that prior ids left unfinished comes whole, with the token that completes it.
        """
        output = output_of([b"a\xe2", b"\x82\xac", b"b"])
        output.go_on_after([0])
        assert [(1, [1], "€"), (2, [2], "b")] == run(output, [1, 2])

    def test_broken_character_was_sent_before(self):
        """
        A code point that the next token leaves broken was sent as U+FFFD with the ids before it.
        """
        output = output_of([b"a\xe2", b"\xe2", b"\x82\xac"])
        output.go_on_after([0])
        assert [(1, [1, 2], "€")] == run(output, [1, 2])

    def test_end_adds_no_text_without_a_token(self):
        """
        An output that ends before a new token came has nothing to release.
        """
        output = output_of([b"a\xe2"])
        output.go_on_after([0])
        assert [] == run(output, [])

    def test_stop_string_may_begin_in_what_was_sent(self):
        """
        A stop string across the break ends the output; text that was sent before is not taken back.
        """
        output = output_of([b"one E", b"N", b"D two"], stops=("END",))
        output.go_on_after([0])
        assert [(1, [1, 2], "")] == run(output, [1, 2])
        assert (3, "END") == (output.num_tokens, output.stopped.stop)

    def test_stop_string_completed_by_a_broken_character_has_nothing_to_release(self):
        """
        A stop string that is completed within ids that were sent, as the next token shows, releases
        no empty chunk.
        """
        output = output_of([b"a\xe2", b"b"], stops=("a\ufffd",))
        output.go_on_after([0])
        assert [] == run(output, [1])
        assert (1, "a\ufffd") == (output.num_tokens, output.stopped.stop)


class TestAnyOutput:
    @pytest.mark.slow
    @settings(max_examples=400, deadline=None)
    @given(
        pieces=st.lists(
            st.one_of(
                st.sampled_from([b"a", b"\n", b"\xe2", b"\x82", b"\xac", b"\xac\xe2", b"\xf0\x9f"]),
                st.binary(max_size=2),
            ),
            min_size=1,
            max_size=12,
        ),
        stops=st.lists(st.text("ab\n€\ufffd", min_size=1, max_size=3), max_size=2),
        takes=st.sets(st.integers(0, 12)),
        includes=st.booleans(),
    )
    def test_break_after_any_chunk_changes_nothing(self, pieces, stops, takes, includes):
        """
        An output that goes on after the ids of any of its chunks releases the same ids and text as
        an unbroken one with the same next tokens.
        """
        unbroken = output_of(pieces, tuple(stops), includes_stop=includes)
        sent, text = 0, ""
        for token_id in range(len(pieces)):
            unbroken.push(token_id)
            chunk = unbroken.take() if token_id in takes else None
            if chunk is not None:
                sent, text = sent + len(chunk.token_ids), text + chunk.text
            if unbroken.stopped is None and chunk is not None:
                resumed = output_of(pieces, tuple(stops), includes_stop=includes)
                resumed.go_on_after(range(sent))
                assert resumed.stopped is None
                rest = run(resumed, list(range(sent, len(pieces))))
                whole = run(
                    output_of(pieces, tuple(stops), includes_stop=includes),
                    list(range(len(pieces))),
                )
                ids = [token_id for _, token_ids, _ in rest for token_id in token_ids]
                assert [i for _, token_ids, _ in whole for i in token_ids] == [*range(sent), *ids]
                assert "".join(t for *_, t in whole) == text + "".join(t for *_, t in rest)
                offsets = [offset for offset, *_ in rest]
                assert offsets == [
                    sent + sum(len(r[1]) for r in rest[:n]) for n in range(len(rest))
                ]

    @settings(max_examples=150, deadline=None)
    @given(
        pieces=st.lists(
            st.one_of(st.text("ab\n€", max_size=3).map(str.encode), st.binary(max_size=2)),
            min_size=1,
            max_size=12,
        ),
        stops=st.lists(st.text("ab\n€\ufffd", min_size=1, max_size=3), max_size=3),
        takes=st.sets(st.integers(0, 12)),
    )
    def test_chunks_are_the_output_up_to_its_stop(self, pieces, stops, takes):
        """
        Chunks that are taken at any time have no gap, and their text is the whole text cut before
        the first stop string, with ids up to the token that completed it.
        """
        output = output_of(pieces, tuple(stops))
        chunks = []
        for token_id in range(len(pieces)):
            output.push(token_id)
            if token_id in takes:
                chunks.append(output.take())
        chunks = [chunk for chunk in (*chunks, output.finish()) if chunk is not None]

        ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        assert list(range(output.num_tokens)) == ids
        offsets = [chunk.first_token_offset for chunk in chunks]
        lengths = [len(chunk.token_ids) for chunk in chunks]
        assert offsets == [sum(lengths[:at]) for at in range(len(chunks))]
        whole = b"".join(pieces).decode(errors="replace")
        ends = [(whole.find(s) + len(s), whole.find(s)) for s in stops if s in whole]
        end, cut = min(ends) if ends else (None, len(whole))
        assert whole[:cut] == "".join(chunk.text for chunk in chunks)
        if end is not None:
            before = b"".join(pieces[: output.num_tokens - 1]).decode(errors="ignore")
            assert len(before) < end
            assert end <= len(b"".join(pieces[: output.num_tokens]).decode(errors="replace"))

    @pytest.mark.slow
    @settings(max_examples=300, deadline=None)
    @given(
        pieces=st.lists(
            st.one_of(st.text("ab\n€", max_size=3).map(str.encode), st.binary(max_size=2)),
            min_size=1,
            max_size=12,
        ),
        stops=st.lists(st.text("ab\n€\ufffd", min_size=1, max_size=3), max_size=3),
        sizes=st.lists(st.integers(1, 4), min_size=12, max_size=12),
        ends=st.sets(st.integers(0, 11), max_size=2),
    )
    def test_tokens_taken_together_are_as_if_one_by_one(self, pieces, stops, sizes, ends):
        """
        Pushing several tokens at once gives the same chunks, ends and counts as pushing each.
        """
        together, single = (
            output_of(pieces, tuple(stops), end_token_ids=frozenset(ends)) for _ in range(2)
        )
        at = 0
        for size in sizes:
            ids = list(range(len(pieces)))[at : at + size]
            at += size
            together.push_all(ids)
            for token_id in ids:
                single.push(token_id)
            assert single.take() == together.take()
            assert (single.num_tokens, single.stopped) == (together.num_tokens, together.stopped)
        assert single.finish() == together.finish()
        assert (single.num_tokens, single.stopped) == (together.num_tokens, together.stopped)
