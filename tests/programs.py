"""Programs that tests need and that a machine may lack."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def is_missing(problem: str) -> NoReturn:
    """End a test for want of a program: it fails in CI, and is skipped, loudly, elsewhere."""
    if os.environ.get("CI"):
        pytest.fail(problem)
    pytest.skip(f"NOT TESTED: {problem}")
