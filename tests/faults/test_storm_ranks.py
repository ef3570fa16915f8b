"""One rank of an executor that has two is lost or slow, again and again, while 64 streams run."""

from __future__ import annotations

import pytest

from tests.faults.schedule import RANK_KINDS, Kind


@pytest.mark.slow
@pytest.mark.timeout(900)
class TestRankStorms:
    @pytest.mark.parametrize("option", ["--tp-size=2", "--pp-size=2"])
    def test_random_rank_is_killed_stopped_or_slow(self, storm, option):
        """
        A rank that is killed, or stopped until the others miss it, costs its executor's streams a
        pause and nothing else; one that is slow costs not even a token computed twice.
        """
        _, lines = storm(RANK_KINDS, times=1, executor=(option,))
        by_kind = {line.kind: line for line in lines}
        assert 0 == by_kind[Kind.RANK_SLOWED].recomputed_tokens
        assert by_kind[Kind.RANK_KILLED].recomputed_tokens > 0
