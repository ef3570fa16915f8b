"""The collector that spans of a test go to."""

import pytest

from tests.otlp_collector import running_collector


@pytest.fixture
def collector():
    with running_collector() as running:
        yield running
