"""Executors that links of one scheduler have."""

from __future__ import annotations

import pytest

from scheduler_svc.executor_client.claims import Claim, Claims
from tandem.errors import IncompatibleExecutor


class TestClaims:
    def test_executor_is_taken_once(self):
        """A second link is told under which address the first has it."""
        claims = Claims()
        with claims.taking("a", Claim("boot", "one:1")):
            pass
        wrong = pytest.raises(IncompatibleExecutor, match="serves already as one:1")
        with wrong, claims.taking("b", Claim("boot", "two:1")):
            pass

    def test_link_may_take_its_own_executor_again(self):
        """A new session follows a lost one with the same executor."""
        claims = Claims()
        for _ in range(2):
            with claims.taking("a", Claim("boot", "one:1")):
                pass
        assert {"one:1"} == claims.taken("b")
        assert set() == claims.taken("a")

    def test_failed_attempt_leaves_what_the_link_had(self):
        """An executor that was asked in vain is free, and the one before is not."""
        claims = Claims()
        with claims.taking("a", Claim("boot-1", "one:1")):
            pass
        with pytest.raises(OSError, match="away"), claims.taking("a", Claim("boot-2", "two:1")):
            raise OSError("away")
        assert {"one:1"} == claims.taken("b")

    def test_given_up_executor_is_free(self):
        """Another link may have it at once."""
        claims = Claims()
        with claims.taking("a", Claim("boot", "one:1")):
            pass
        claims.drop("a")
        with claims.taking("b", Claim("boot", "one:1")):
            pass
        assert {"one:1"} == claims.taken("a")
