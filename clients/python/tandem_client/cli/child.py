"""
Run by path, before the real program: asks the kernel to kill this process when its parent dies,
then becomes the program. Arguments: the parent's process id, then the command.

Needs nothing but the standard library, so that it starts fast. Where the kernel cannot do it, the
program runs all the same.
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
        if os.getppid() != parent:  # it died before the request was in force
            sys.exit(1)
    os.execv(command[0], command)  # noqa: S606 -- the command is the parent's own


if __name__ == "__main__":
    main()
