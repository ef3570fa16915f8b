"""
Plays a caller of the Python client: `python -m tandem_conformance [--loop]` carries out the
commands that it reads, with threads or, with `--loop`, in an event loop.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from tandem_conformance.loop import LoopCaller
from tandem_conformance.threads import ThreadCaller

_printing = threading.Lock()


def say(line: dict[str, Any]) -> None:
    """Print one line as a whole."""
    text = json.dumps(line, ensure_ascii=False)
    with _printing:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def main() -> None:
    """Read commands until the input ends."""
    caller = LoopCaller(say) if "--loop" in sys.argv[1:] else ThreadCaller(say)
    for line in sys.stdin:
        caller.begin(json.loads(line))
    caller.close()


if __name__ == "__main__":
    main()
