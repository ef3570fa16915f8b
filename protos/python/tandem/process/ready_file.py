"""The ready file of a process: where it listens, for the program that started it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from tandem.errors import InvalidConfig


def write_ready_file(path: Path, addresses: Mapping[str, str | None]) -> None:
    """
    Write a process's addresses, by their names, and its pid as JSON: readers find all of it or
    none. An address that the process does not have is null.

    Raises:
        InvalidConfig: The file cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(json.dumps({**addresses, "pid": os.getpid()}), encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise InvalidConfig(f"ready_file: {path}: {error.strerror}") from error
