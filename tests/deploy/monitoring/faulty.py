"""
`python -m tests.deploy.monitoring.faulty`: an executor whose steps obey the marks and files of
tests/faults.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from executor_svc.device.idle_threads import let_idle_threads_sleep
from executor_svc.profile.quiet import silence_profiler

FOLDER = "FAULTS_DIR"


def obeyed_environment(folder: Path) -> dict[str, str]:
    """Return the environment of an executor that obeys the files of a folder."""
    return {FOLDER: str(folder)}


if __name__ == "__main__":
    let_idle_threads_sleep(os.environ)
    silence_profiler(os.environ)
    # This imports PyTorch, which reads the environment then.
    from tests.faults.processes.faulty_executor import main

    sys.exit(main(sys.argv[1:]))
