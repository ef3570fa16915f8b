"""One thread per operation in every test: tiny tensors gain nothing from more, and cores are few."""

from __future__ import annotations

import os

# Read by OpenMP when torch is first imported, here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
