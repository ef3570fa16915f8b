"""Server that a command starts for itself alone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from tandem_client.cli.local_server.service import ServiceFailed
from tandem_client.cli.local_server.services import LocalServer, local_server
from tandem_client.cli.shared.failures import fail
from tandem_client.cli.shared.waiting import say


@contextlib.contextmanager
def server_at(address: str, up: Path | None) -> Iterator[str]:
    """Yield `address`, or, with `up`, the address of a server for this command alone."""
    if up is None:
        yield address
        return
    started_s = time.monotonic()
    plan = LocalServer(
        executor_arguments=["--model", str(up)],
        scheduler_arguments=["--listen", "127.0.0.1:0", "--admin-listen=", "--metrics-listen="],
    )
    try:
        with local_server(plan, say) as server:
            say(f"ready at {server.address} after {time.monotonic() - started_s:.1f} s")
            yield server.local_address
    except ServiceFailed as failure:
        raise fail(failure.line, failure.code) from None
