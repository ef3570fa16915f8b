"""Rows as JSON that are there as soon as they are measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Self


class JsonRows:
    """
    Prints one JSON list, a row a line and each at once: of a run that is killed all rows but the
    closing bracket are there, and one that fails closes the list.
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

    def add(self, row: Mapping[str, str | int | float | bool]) -> None:
        """Print one."""
        self._print(self._before + json.dumps(row))
        self._before = ",\n"

    @staticmethod
    def _print(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
