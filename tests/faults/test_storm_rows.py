"""Requests that are bad for themselves, or for the executor that computes them."""

from __future__ import annotations

import pytest

from tests.faults.schedule import Kind


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestBadRequests:
    def test_bad_row_fails_alone(self, storm):
        """
        A row with logits that are not numbers fails INVALID_LOGITS; its 64 neighbours are not
        affected.
        """
        _, lines = storm([Kind.BAD_ROW])
        assert 0 == lines[0].recomputed_tokens

    def test_request_that_kills_executors_fails_alone(self, storm):
        """
        A request that kills each executor that computes it, at once or after some tokens, is found
        and fails POISON_REQUEST; no other request fails.
        """
        storm([Kind.POISON], num_executors=2)
