"""A real Chromium, driven by chromedriver through the protocol WebDriver (W3C)."""

from __future__ import annotations

import base64
import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import httpx

from tests.ports import free_port
from tests.waiting import wait_until

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,1400",
)
DEADLINE_S = 120.0


class Browser:
    """One window of a browser."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http = http
        self._session = session

    def open(self, url: str) -> None:
        self._call("url", {"url": url})

    def run(self, script: str) -> Any:
        """Run a function's body in the page, and return what it returns."""
        return self._call("execute/sync", {"script": script, "args": []})

    def screenshot(self) -> bytes:
        """Return the window as PNG."""
        answer = self._http.get(f"/session/{self._session}/screenshot").json()
        return base64.b64decode(answer["value"])

    def _call(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._http.post(f"/session/{self._session}/{path}", json=body)
        value = answer.json()["value"]
        assert 200 == answer.status_code, value
        return value


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Run a browser with an empty profile until the block ends."""
    driver = shutil.which("chromedriver")
    assert driver is not None, "chromedriver is missing: apt-get install chromium chromium-driver"
    port = free_port()
    with tempfile.TemporaryDirectory() as profile, contextlib.ExitStack() as stack:
        process = subprocess.Popen(
            [driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        stack.callback(process.wait)
        stack.callback(process.terminate)
        http = stack.enter_context(
            httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=DEADLINE_S)
        )

        def is_up() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return http.get("/status").json()["value"]["ready"]
            return False

        wait_until(is_up, "chromedriver")
        options = {"args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
        session = http.post("/session", json=wanted).json()["value"]["sessionId"]
        stack.callback(lambda: http.delete(f"/session/{session}"))
        yield Browser(http, session)
