"""Flags of programs that argparse reads: what a process tells of itself, and where."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_ready_file_flag(parser: argparse.ArgumentParser) -> None:
    """Add --ready-file, for `tandem.process.ready_file`."""
    parser.add_argument("--ready-file", type=Path, help="file that gets address and pid as JSON")


def add_log_level_flag(parser: argparse.ArgumentParser) -> None:
    """Add --log-level, for `tandem.process.telemetry`."""
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="least severe event to log to stderr; default: %(default)s",
    )


def add_log_format_flag(parser: argparse.ArgumentParser) -> None:
    """Add --log-format, for `tandem.process.telemetry`."""
    parser.add_argument(
        "--log-format",
        choices=("console", "json"),
        default="console",
        help="form of log lines; default: %(default)s",
    )
