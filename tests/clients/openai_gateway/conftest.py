"""Fixtures of the gateway's tests: the real clients of OpenAI against a gateway and a fake scheduler."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.clients.openai_gateway.serving import gateway
from tests.clients.python.fake_server import fake_server
from tests.e2e.cluster import Process


@pytest.fixture
def server():
    """A fake scheduler that answers well unless told otherwise."""
    with fake_server() as running:
        yield running


@pytest.fixture
def url(server):
    """The URL of a gateway in front of the fake."""
    with gateway(server.address) as served:
        yield served


@pytest.fixture
def client(url):
    """OpenAI's client, which does not retry."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as connected:
        yield connected


@pytest.fixture
def http(url):
    """A plain HTTP client, for what OpenAI's client does not show."""
    with httpx.Client(base_url=url, trust_env=False) as connected:
        yield connected


@pytest.fixture
def start(tmp_path):
    """Start a gateway process with these flags, and return its address."""
    processes = []

    def run(*flags):
        arguments = ["--listen=127.0.0.1:0", *map(str, flags)]
        processes.append(Process("tandem_openai_gateway", arguments, tmp_path, "gateway"))
        return processes[-1].addresses()["address"]

    yield run
    for process in processes:
        process.end()
