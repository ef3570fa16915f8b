"""Fixtures of the client's tests."""

from __future__ import annotations

import pytest

from tests.clients.python.fake_server import fake_server


@pytest.fixture
def server():
    """A fake server that answers well unless told otherwise."""
    with fake_server() as running:
        yield running
