"""The connection between scheduler and executor is cut, delayed and damaged, once a second."""

from __future__ import annotations

import pytest

from tests.faults.conftest import TIMES
from tests.faults.logs import count
from tests.faults.schedule import BYTE_KINDS, MESSAGE_KINDS, Kind


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestLinkStorms:
    def test_reset_recomputes_nothing(self, storm):
        """
        A connection reset again and again under 64 streams loses no token, no stream and no step:
        nothing is computed twice.
        """
        done, lines = storm([Kind.RESET], times=5, link="bytes")
        assert 0 == lines[0].recomputed_tokens
        assert 1 == count(done.rig.logs(), "session_opened")
        assert 5 <= done.rig.proxies[0].ask("count")["done"]
        assert done.rig.stats().steps == done.rig.executors[0].num_steps()

    def test_bytes(self, storm):
        """
        Connections that are reset, swallow packets, crawl, end within a frame or flip bits lose no
        token and no stream.
        """
        done, _ = storm(BYTE_KINDS, link="bytes")
        assert 3 * TIMES <= done.rig.proxies[0].ask("count")["done"]

    def test_unreachable_executor(self, storm):
        """
        Streams of an executor that no packet reaches for longer than lost_after_s go on at another
        one, and may come back to it.
        """
        storm([Kind.UNREACHABLE], link="bytes", num_executors=2, scheduler=("--lost-after-s=3",))

    def test_clients(self, storm):
        """
        A client gets the rest of a stream by asking for it after its connection is reset.
        """
        done, _ = storm([Kind.CLIENT_RESET], has_client_proxy=True)
        assert TIMES <= done.rig.client_proxy.ask("count")["done"]

    def test_messages(self, storm):
        """
        Step and result messages that are repeated, reordered, cut, changed or dropped lose no token
        and no stream.
        """
        done, _ = storm(MESSAGE_KINDS, link="messages")
        assert 5 * TIMES == done.rig.proxies[0].ask("count")["done"]
