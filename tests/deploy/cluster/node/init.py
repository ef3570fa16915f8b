"""
The first process of a cluster's namespaces: `python -m tests.deploy.cluster.node.init MODULE ARGUMENT ...`.

It runs a module and waits for all processes that lose their parent, as the kernel demands of it. All
processes of the namespaces end with it.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    """Run a module, and return its exit status."""
    child = os.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-m", *sys.argv[1:]])
    # Interrupts from a terminal reach the child as well, which ends in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        ended, status = os.wait()
        if ended == child:
            return os.waitstatus_to_exitcode(status) & 0xFF


if __name__ == "__main__":
    sys.exit(main())
