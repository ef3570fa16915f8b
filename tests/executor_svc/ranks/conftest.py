"""The model of the ranks' tests."""

from __future__ import annotations

import pytest

from tests.e2e.cluster import BUNDLED_MODEL


@pytest.fixture(scope="session")
def bundled_model():
    return BUNDLED_MODEL
