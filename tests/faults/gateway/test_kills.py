"""Schedulers that are killed under streams over HTTP."""

from __future__ import annotations

import pytest

from tests.faults.gateway.kills import storm


@pytest.mark.slow
def test_users_of_http_notice_a_pause_only(tmp_path):
    """
    With one of two schedulers killed under eight streams, twice, each text is that of a run without
    kills, and streams were resumed.
    """
    outcome = storm(tmp_path, num_streams=8, num_kills=2)
    assert ([], 0) == (outcome.failed, outcome.different)
    assert outcome.read >= 8
    assert outcome.resumes > 0
