"""
Launcher of a child process, run by path: it asks the kernel to kill this process when its parent
dies, then executes the real program in its place. Arguments: the parent's process id, then the
command.

It imports only the standard library, so that it starts fast. On a kernel other than Linux, the
program runs without that protection.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent and become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent died before prctl took effect
            sys.exit(1)
    os.execv(command[0], command)  # noqa: S606  # the command is the parent's own


if __name__ == "__main__":
    main()
