"""The real Prometheus on this machine, which reads the pods' pages and is asked what it counted."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from pathlib import Path

import yaml

from tests.deploy.pods.counting.monitors import Document
from tests.ports import free_port

INTERVAL_S = 3
"""Seconds between two scrapes, and the longest time of one."""
LIMIT_S = 60.0
"""Longest time until a page is read."""


class PrometheusError(Exception):
    """Prometheus is missing, does not start, or refuses a question."""


class Prometheus:
    """A running Prometheus. Owned by the harness, which calls `close`."""

    def __init__(self, folder: Path, content: Document) -> None:
        """
        Start it, and wait until it has read something.

        Args:
            folder: Folder for its files.
            content: Content of its prometheus.yml.

        Raises:
            PrometheusError: It is missing, or does not start.
        """
        program = shutil.which("prometheus")
        if program is None:
            raise PrometheusError("prometheus is missing (Debian: apt-get install prometheus)")
        folder.mkdir()
        file = folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(content))
        self._log = folder / "prometheus.log"
        listen = f"127.0.0.1:{free_port()}"
        self._url = f"http://{listen}/api/v1/query"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    f"--config.file={file}",
                    f"--storage.tsdb.path={folder / 'tsdb'}",
                    f"--web.listen-address={listen}",
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is the harness's, which ends it
            )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def ask(self, query: str) -> dict[str, float]:
        """
        Return the values that a query has now, by the label `pod`, or by "" without one.

        Raises:
            PrometheusError: Prometheus refuses the query.
        """
        url = f"{self._url}?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                result = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise PrometheusError(f"{query}: {error.read().decode()}") from error
        values = {one["metric"].get("pod", ""): float(one["value"][1]) for one in result}
        return {pod: value for pod, value in values.items() if not math.isnan(value)}

    def settle(self, pods: Iterable[str]) -> None:
        """
        Wait until the pages of some pods have been read once more, from the first line to the last.

        Raises:
            PrometheusError: They are not, within `LIMIT_S`.
        """
        began_s = time.time()
        until = time.monotonic() + LIMIT_S
        missing = set(pods)
        while time.monotonic() < until:
            read = self.ask("timestamp(up) and up == 1")
            missing = {pod for pod in pods if read.get(pod, 0.0) <= began_s}
            if not missing:
                return
            time.sleep(0.2)
        raise PrometheusError(f"Prometheus cannot read {', '.join(sorted(missing))}")

    def close(self) -> None:
        """Stop it."""
        self._process.kill()
        self._process.wait()

    def _wait(self) -> None:
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until and self._process.poll() is None:
            with contextlib.suppress(OSError, PrometheusError):  # it does not listen yet
                if self.ask("up"):
                    return
            time.sleep(0.2)
        raise PrometheusError(f"Prometheus reads nothing: {self._log.read_text()[-2000:]}")
