"""
Process that starts executors in a moment: it has imported everything, and forks.

    python -m tests.faults.processes.zygote

Importing PyTorch takes a core some seconds; a storm restarts executors dozens of times. This
process never uses gRPC or computes, so that its children start as if they were alone.
"""

from __future__ import annotations

import os
import select
import sys

from executor_svc.device.idle_threads import let_idle_threads_sleep

let_idle_threads_sleep(os.environ)

import executor_svc.server.server  # noqa: E402, F401  # for the children
from tandem.process.parent import die_with_parent  # noqa: E402
from tests.faults.processes import faulty_executor  # noqa: E402
from tests.faults.proxies.controlled import Json  # noqa: E402


def _child(command: Json) -> None:
    """Become an executor; never return."""
    code = 1
    try:
        die_with_parent()
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        log = os.open(command["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.closerange(3, 256)
        os.environ.update(command["env"])
        code = faulty_executor.main(command["argv"])
        sys.stderr.flush()
    finally:
        os._exit(code)


def main() -> None:
    """Fork for every line of stdin; print a line of JSON for each child that started or ended."""
    import json  # noqa: PLC0415  # beside what it is used for

    def say(what: Json) -> None:
        os.write(1, json.dumps(what).encode() + b"\n")

    say({"ready": True})
    pending = b""
    while True:
        if select.select([0], [], [], 0.02)[0]:
            data = os.read(0, 65536)
            if not data:
                os._exit(0)
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                command = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    _child(command)
                say({"started": command["id"], "pid": pid})
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            say({"ended": pid, "code": os.waitstatus_to_exitcode(status)})


if __name__ == "__main__":
    main()
