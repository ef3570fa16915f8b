"""Logging of the services."""

from __future__ import annotations

import errno
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


class Disk:
    """A file that can be full."""

    def __init__(self):
        self.is_full = False
        self.text = ""

    def write(self, text):
        """Take text, or refuse it if the disk is full."""
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.text += text

    def flush(self):
        """Do nothing, since no text is buffered."""

    def isatty(self):
        """Return False: no terminal shows this text."""
        return False


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
        A process with its log on a full disk works on.
        """
        with open("/dev/full", "w") as full:  # noqa: PTH123  # a device
            done = subprocess.run(
                [sys.executable, "-c", TO_A_FULL_DISK],
                stdout=subprocess.PIPE,
                stderr=full,
                text=True,
                timeout=60,
                check=False,
            )

        assert "alive\n" == done.stdout
