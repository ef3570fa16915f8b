"""A console in a thread of the test's process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn

from tandem.http_server.listening import listen
from tandem_console.app import Console, make_app
from tandem_console.settings import Settings
from tests.waiting import wait_until


@contextlib.contextmanager
def console(admin_address: str, **settings: Any) -> Iterator[str]:
    """Serve a console in front of this scheduler until the block ends; yield its URL."""
    listener, address = listen("127.0.0.1:0")
    values = {"interval_s": 0.2} | settings
    app = make_app(Console(Settings(admin_address=admin_address, listen=address, **values)))
    config = uvicorn.Config(
        app, log_config=None, lifespan="on", timeout_graceful_shutdown=1, ws="none"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        wait_until(lambda: server.started, "the console")
        yield f"http://{address}"
    finally:
        server.should_exit = True
        thread.join()
