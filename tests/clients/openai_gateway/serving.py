"""A gateway in a thread of the test's process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn

from tandem.http_server.listening import listen
from tandem_openai_gateway.app import make_app
from tandem_openai_gateway.settings import Settings
from tests.waiting import wait_until


@contextlib.contextmanager
def gateway(*schedulers: str, **settings: Any) -> Iterator[str]:
    """Serve in front of these schedulers until the block ends; yield the URL."""
    listener, address = listen("127.0.0.1:0")
    app = make_app(Settings(schedulers=schedulers, **settings))
    config = uvicorn.Config(
        app, log_config=None, lifespan="on", timeout_graceful_shutdown=1, ws="none"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        wait_until(lambda: server.started, "the gateway")
        yield f"http://{address}"
    finally:
        server.should_exit = True
        thread.join()
