"""
The real executor, whose collectives wait for a rank for seconds in place of an hour.

    python -m tests.executor_svc.ranks.impatient ARGUMENTS OF executor_svc
"""

from __future__ import annotations

import sys

import executor_svc.__main__ as executor_main
from executor_svc.ranks import joining

COLLECTIVE_S = 5.0

if __name__ == "__main__":
    vars(joining)["COLLECTIVE_S"] = COLLECTIVE_S
    sys.exit(executor_main.main(sys.argv[1:]))
