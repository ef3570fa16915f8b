"""Requests that are bad for themselves, or for whoever computes them."""

from __future__ import annotations

import pytest

from tests.faults.schedule import Kind


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestBadRequests:
    def test_bad_row_fails_alone(self, storm):
        """
        A row whose logits are not numbers fails INVALID_LOGITS; its 64 neighbours notice nothing.
        """
        _, lines = storm([Kind.BAD_ROW])
        assert 0 == lines[0].recomputed_tokens

    def test_request_that_kills_executors_fails_alone(self, storm):
        """
        A request that kills whoever computes it is found and fails POISON_REQUEST, and nobody else
        does, whether it kills at once or after some tokens.
        """
        storm([Kind.POISON], num_executors=2)
