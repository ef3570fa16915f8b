"""Fixtures of the client's tests."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tandem_client.cli.app import app
from tests.clients.python.fake_server import fake_server
from tests.clients.python.terminal import Terminal


@pytest.fixture
def server():
    """A fake server that answers well unless told otherwise."""
    with fake_server() as running:
        yield running


@pytest.fixture
def run():
    """Run a command in this process and return its result."""

    def invoke(*arguments, stdin=None):
        return CliRunner().invoke(app, list(arguments), input=stdin)

    return invoke


@pytest.fixture
def tandem():
    """Start a command in a process of its own."""
    started = []

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-m", "tandem_client", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def terminal():
    """Start commands at terminals."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str, shares: bool = True) -> Terminal:
            found = Terminal(*arguments, shares=shares)
            stack.callback(found.close)
            return found

        yield start
