"""JSON output that appears row by row, as soon as each is measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Self


class JsonRows:
    """
    Writer of one JSON list to stdout: a row per line, flushed at once.

    A run that is killed leaves all its rows, without the closing bracket; a run that fails with an
    exception closes the list.
    """

    def __init__(self) -> None:
        self._before = "["

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._print(("[" if self._before == "[" else "") + "]\n")

    def add(self, row: Mapping[str, object]) -> None:
        """Print one row."""
        self._print(self._before + json.dumps(row))
        self._before = ",\n"

    @staticmethod
    def _print(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
