import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.ipc.token_run import MAX_RUN_BYTES, TokenRun
from tests.scheduler_svc.service.token_rows import token_rows


def streams_of(*streams: int) -> bytes:
    return np.array(streams, "<u4").tobytes()


def ids_of(*ids: int) -> bytes:
    return np.array(ids, "<i4").tobytes()


def offsets_of(*offsets: int) -> np.ndarray:
    return np.array(offsets, np.int32)


def read(run: TokenRun) -> list[tuple[int, int, list[int]]]:
    return [
        (stream, offset, np.frombuffer(ids, "<i4").tolist())
        for stream, offset, ids in run.by_stream()
    ]


class TestExtending:
    def test_steps_of_the_same_streams_become_one_run(self):
        """
        Steps that go on where a run ends are taken in, and each stream gets its own tokens.
        """
        run = TokenRun(streams_of(7, 2**32 - 1), offsets_of(3, 0), ids_of(1, 2))
        assert run.try_extend(streams_of(7, 2**32 - 1), offsets_of(4, 1), ids_of(3, 4))
        assert run.try_extend(streams_of(7, 2**32 - 1), offsets_of(5, 2), ids_of(5, 6, 7, 8))
        assert [(7, 3, [1, 3, 5, 7]), (2**32 - 1, 0, [2, 4, 6, 8])] == read(run)

    @pytest.mark.parametrize(
        ("streams", "offsets"),
        [((7, 9), (4, 1)), ((7,), (4,)), ((7, 8), (4, 2)), ((7, 8), (3, 0)), ((8, 7), (1, 4))],
        ids=["other stream", "fewer", "gap", "repetition", "other order"],
    )
    def test_what_does_not_go_on_is_not_taken(self, streams, offsets):
        """
        A run takes no step of other streams, and none with a gap or a repetition.
        """
        run = TokenRun(streams_of(7, 8), offsets_of(3, 0), ids_of(1, 2))
        ids = ids_of(*range(len(streams)))
        assert not run.try_extend(streams_of(*streams), offsets_of(*offsets), ids)
        assert [(7, 3, [1]), (8, 0, [2])] == read(run)

    def test_size_is_bounded(self):
        """
        A run takes no step that would make its message longer than the bound.
        """
        count = MAX_RUN_BYTES // 4 // 10
        streams, ids = streams_of(*range(count)), ids_of(*range(count))
        run = TokenRun(streams, np.zeros(count, np.int32), ids)
        taken = [
            run.try_extend(streams, np.full(count, step, np.int32), ids) for step in range(1, 12)
        ]
        assert [True] * 9 + [False, False] == taken
        assert MAX_RUN_BYTES >= len(run.update().token)

    def test_several_tokens_of_a_stream_in_one_step(self):
        """
        A step may have several tokens of a stream; no other step joins it.
        """
        run = TokenRun(streams_of(7, 7), offsets_of(0, 1), ids_of(1, 2))
        assert not run.try_extend(streams_of(7, 7), offsets_of(2, 3), ids_of(3, 4))
        assert [(7, 0, [1]), (7, 1, [2])] == read(run)


class TestMessages:
    @settings(max_examples=50)
    @given(st.integers(1, 5), st.lists(st.integers(1, 3), min_size=1, max_size=5), st.randoms())
    def test_messages_hold_all_tokens_in_order(self, count, rows, random):
        """
        Every stream's tokens come once and in order, however steps are joined and on whichever end.
        """
        streams = streams_of(*range(10, 10 + count))
        first = [random.randrange(1000) for _ in range(count)]
        expected: dict[int, list[int]] = {10 + at: [] for at in range(count)}
        run = None
        done = 0
        for num in rows:
            ids = [[random.randrange(2**31) for _ in range(count)] for _ in range(num)]
            for row in ids:
                for at, token in enumerate(row):
                    expected[10 + at].append(token)
            step = (
                streams,
                np.array(first, np.int32) + done,
                ids_of(*(token for row in ids for token in row)),
            )
            done += num
            if run is None:
                run = TokenRun(*step)
            else:
                assert run.try_extend(*step)
        assert run is not None
        assert [(10 + at, first[at], expected[10 + at]) for at in range(count)] == read(run)
        update = run.update()
        assert [
            (10 + at, first[at] + row, expected[10 + at][row])
            for row in range(done)
            for at in range(count)
        ] == token_rows(update)
        again = TokenRun(
            update.token_stream, np.frombuffer(update.token_offset, np.int32), update.token
        )
        assert read(run) == read(again)
