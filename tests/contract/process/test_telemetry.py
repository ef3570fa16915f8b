"""Logging of the services."""

from __future__ import annotations

import errno
import io
import json
import subprocess
import sys

import structlog

from tandem.process.telemetry import configure_logging, log_worded

TO_A_FULL_DISK = """
import structlog
from tandem.process.telemetry import configure_logging

configure_logging("info", "console")
for number in range(3000):
    structlog.get_logger().info("event", number=number)
print("alive", flush=True)
"""
TO_A_DISK_WITH_ROOM_FOR_25_BYTES = """
import resource, sys
from tandem.process.telemetry import LineLogger

lines = LineLogger(sys.stderr)
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (25, most))
for number in range(3):
    lines.msg(f"line number 0{number}")
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
lines.msg("line number 03")
"""


class Disk(io.StringIO):
    """A file in memory that can be full."""

    is_full = False

    @property
    def text(self) -> str:
        """Return what was written."""
        return self.getvalue()

    def write(self, text: str) -> int:
        """Take text, or refuse it if the disk is full."""
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


class TestConfigureLogging:
    def test_lines_that_cannot_be_written_are_counted(self, monkeypatch):
        """
        Lines on a full disk are dropped without an error; then one line tells how many.
        """
        disk = Disk()
        monkeypatch.setattr(sys, "stderr", disk)
        configure_logging("info", "json")
        log = structlog.get_logger()
        log.info("first")
        disk.is_full = True
        log.warning("second")
        structlog.get_logger().error("third")
        disk.is_full = False
        log.info("fourth")
        lines = [json.loads(line) for line in disk.text.splitlines()]

        assert ["first", "fourth", "log_lines_dropped"] == [line["event"] for line in lines]
        assert 2 == lines[-1]["lines"]

    def test_line_with_a_known_wording_is_keys_in_json_and_that_wording_as_text(self, monkeypatch):
        """
        A line with a known wording is an event name and keys in JSON, and that sentence alone as
        text.
        """
        disk = Disk()
        monkeypatch.setattr(sys, "stderr", disk)
        for log_format in ("json", "console"):
            configure_logging("info", log_format)
            log = structlog.get_logger()
            log_worded(log, "decode_batch", {"tokens": 3}, "Decode batch. #token: 3")
        as_json, as_text = disk.text.splitlines()

        assert {"event": "decode_batch", "tokens": 3, "level": "info"} == {
            key: value for key, value in json.loads(as_json).items() if key != "timestamp"
        }
        assert as_text.rstrip().endswith("] Decode batch. #token: 3")

    def test_level_below_the_chosen_one_is_silent(self, monkeypatch):
        """
        Events below the level are not written.
        """
        disk = Disk()
        monkeypatch.setattr(sys, "stderr", disk)
        configure_logging("warning", "console")
        structlog.get_logger().info("quiet")
        structlog.get_logger().warning("loud", key=1)

        assert "quiet" not in disk.text
        assert "loud" in disk.text

    def test_full_disk_does_not_end_the_process(self):
        """
        A process with its log on a full disk works on, and ends with an exit code of its own.
        """
        with open("/dev/full", "w") as full:  # noqa: PTH123  # a device
            done = subprocess.run(
                [sys.executable, "-c", TO_A_FULL_DISK],
                stdout=subprocess.PIPE,
                stderr=full,
                text=True,
                timeout=60,
                check=True,
            )

        assert "alive\n" == done.stdout

    def test_cut_line_is_counted_and_ends_before_the_next_one(self, tmp_path):
        """
        A line for which a disk has room only in part is dropped, and what is written next begins on a line of its own.
        """
        path = tmp_path / "log"
        with path.open("w") as log:
            done = subprocess.run(
                [sys.executable, "-c", TO_A_DISK_WITH_ROOM_FOR_25_BYTES],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                timeout=60,
                check=True,
            )
        lines = path.read_text().splitlines()

        assert ["line number 00", "line numbe", "line number 03"] == lines
        assert "lines=2" in done.stdout
