"""
Which implementation of each operation runs where: chosen once per operation and device kind,
logged, never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import structlog
import torch

Implementation = TypeVar("Implementation", bound=Callable[..., object])

REFERENCE = "reference"

_log = structlog.get_logger(__name__)
_choices: dict[str, str] = {}
_operations: dict[str, Operation[Callable[..., object]]] = {}


class Operation(Generic[Implementation]):
    """
    One operation and its implementations.

    The reference runs everywhere and is what a device kind gets that has nothing faster.
    `configure` overrides.
    """

    def __init__(
        self,
        name: str,
        reference: Implementation,
        faster: Mapping[str, tuple[str, Implementation]] | None = None,
    ) -> None:
        """
        Args:
            name: Of the operation, its folder's.
            reference: The definition.
            faster: By device kind ("cpu", "cuda"), the name and code of what to run instead.
        """
        self.name = name
        self._reference = reference
        self._faster = dict(faster or {})
        self._chosen: dict[str, Implementation] = {}
        _operations[name] = self  # type: ignore[assignment]  # callables of any signature

    def on(self, device: torch.device) -> Implementation:
        """The implementation for a device; the first question per device kind decides and logs."""
        chosen = self._chosen.get(device.type)
        if chosen is None:
            chosen = self._chosen[device.type] = self._choose(device.type)
        return chosen

    def forget(self) -> None:
        """Decide again at the next question."""
        self._chosen.clear()

    def _choose(self, kind: str) -> Implementation:
        name, chosen = self._faster.get(kind, (REFERENCE, self._reference))
        wanted = _choices.get(self.name, name)
        if wanted == REFERENCE:
            name, chosen = REFERENCE, self._reference
        elif wanted != name:
            available = ", ".join(sorted({REFERENCE, name}))
            raise ValueError(
                f"{self.name} has no implementation {wanted!r} for {kind}; available: {available}"
            )
        _log.info("kernel_chosen", operation=self.name, device=kind, implementation=name)
        return chosen


def configure(choices: Mapping[str, str]) -> None:
    """
    Fix implementations by operation name, for example `{"paged_attention": "reference"}`; others
    choose by device.

    Raises:
        ValueError: No such operation. An implementation that does not exist raises when it is first
            needed.
    """
    for name in choices:
        if name not in _operations:
            raise ValueError(f"no operation {name!r}; known: {', '.join(sorted(_operations))}")
    _choices.clear()
    _choices.update(choices)
    for operation in _operations.values():
        operation.forget()
