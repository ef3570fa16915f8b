"""Fixtures of the console's tests: a fake scheduler, and a console in front of it."""

from __future__ import annotations

import httpx
import pytest

from tests.clients.console.serving import console
from tests.clients.python.fake_server import fake_server


@pytest.fixture
def server():
    """A fake scheduler that answers well unless told otherwise."""
    with fake_server() as running:
        yield running


@pytest.fixture
def url(server):
    """The URL of a console in front of the fake."""
    with console(server.address) as served:
        yield served


@pytest.fixture
def http(url):
    """A browser's part of HTTP: it keeps cookies."""
    with httpx.Client(base_url=url, trust_env=False) as connected:
        yield connected
