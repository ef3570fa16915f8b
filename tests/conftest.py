"""
What all tests share: one thread per operation, examples without a deadline, logs as structlog
finds them.
"""

from __future__ import annotations

import os

import pytest
import structlog
from hypothesis import settings

# How long an example takes says more about the machine than about the code.
settings.register_profile("any time", deadline=None)
settings.load_profile("any time")

# Read by OpenMP when torch is first imported, here and in the processes that tests start. Tiny
# tensors gain nothing from more threads, and cores are few.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def default_logs():
    """Undo what a test, or an engine that it made, set up for the whole process's logs."""
    yield
    structlog.reset_defaults()
