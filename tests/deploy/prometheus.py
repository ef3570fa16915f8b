"""The real Prometheus as a process on this machine, and questions to it."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.ports import free_port
from tests.waiting import TooLate, wait_until

START_LIMIT_S = 60.0
"""Longest time until it answers and has read a page."""


class PrometheusError(Exception):
    """Prometheus is missing, does not start, or refuses a question."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One series of an answer: its labels, and its value now."""

    labels: dict[str, str]
    value: float


class PrometheusProcess:
    """A running Prometheus. Owned by the harness, which calls `close`."""

    def __init__(self, folder: Path, content: dict[str, Any]) -> None:
        """
        Start it, and wait until it has read something.

        Args:
            folder: Folder for its files, which exists.
            content: Content of its prometheus.yml.

        Raises:
            PrometheusError: It is missing, or does not start.
        """
        program = shutil.which("prometheus")
        if program is None:
            raise PrometheusError("prometheus is missing (Debian: apt-get install prometheus)")
        file = folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(content))
        log = folder / "prometheus.log"
        listen = f"127.0.0.1:{free_port()}"
        self._url = f"http://{listen}/api/v1"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    program,
                    f"--config.file={file}",
                    f"--storage.tsdb.path={folder / 'tsdb'}",
                    f"--web.listen-address={listen}",
                ],
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is the harness's, which ends it
            )
        try:
            wait_until(self._has_read_or_ended, "Prometheus reads a page", START_LIMIT_S, 0.2)
        except TooLate as error:
            self.close()
            raise PrometheusError(f"{error}: {log.read_text()[-2000:]}") from error
        except BaseException:
            self.close()
            raise
        if self._process.poll() is not None:
            raise PrometheusError(f"Prometheus does not start: {log.read_text()[-2000:]}")

    def samples(self, query: str) -> list[Sample]:
        """
        Return the series that a query has now, NaN left out.

        Raises:
            PrometheusError: Prometheus refuses the query.
        """
        result = self.get("query", {"query": query})["result"]
        found = [Sample(one["metric"], float(one["value"][1])) for one in result]
        return [one for one in found if not math.isnan(one.value)]

    def get(self, what: str, arguments: dict[str, str] | None = None) -> dict[str, Any]:
        """
        Return the data of an answer of its HTTP API.

        Args:
            what: Path below /api/v1.
            arguments: Arguments of the question.

        Raises:
            PrometheusError: Prometheus refuses it.
        """
        url = f"{self._url}/{what}?{urllib.parse.urlencode(arguments or {})}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                data: dict[str, Any] = json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise PrometheusError(f"{arguments}: {error.read().decode()}") from error
        return data

    def close(self) -> None:
        """Stop it."""
        self._process.kill()
        self._process.wait()

    def _has_read_or_ended(self) -> bool:
        if self._process.poll() is not None:
            return True
        try:
            return bool(self.samples("up"))
        except (OSError, PrometheusError):  # it does not listen, or is not ready yet
            return False
