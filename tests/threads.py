"""Number of threads of one operation, in the tests and in the processes that they start."""

from __future__ import annotations

import os

NUM_THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))
"""One unless a run asks for more (tests.processors): products are tiny, and cores are few."""
