"""
The choice of an implementation for each operation: made once per operation and device kind, logged,
and kept until it is configured or offered anew.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import structlog
import torch

Implementation = TypeVar("Implementation", bound=Callable[..., object])

REFERENCE = "reference"
CPU_EXTENSION = "cpu-extension"
"""Name under which operations offer their implementation of the C++ library."""

_log = structlog.get_logger(__name__)
_choices: dict[str, str] = {}
_operations: dict[str, Operation[Callable[..., object]]] = {}


class TritonMissing(RuntimeError):
    """A device was chosen that needs Triton's kernels, and Triton is not installed."""


@dataclass(frozen=True, slots=True)
class Deferred:
    """
    Code that is imported when a device first needs it, because its module imports Triton.

    `module` is the module's full name, `attribute` the name of the function in it.
    """

    module: str
    attribute: str


class Operation(Generic[Implementation]):
    """
    One operation and its implementations.

    The reference runs everywhere, and is used on device kinds that have nothing faster. `configure`
    overrides the choice.
    """

    def __init__(
        self,
        name: str,
        reference: Implementation,
        faster: Mapping[str, tuple[str, Implementation | Deferred]] | None = None,
    ) -> None:
        """
        Args:
            name: Name of the operation.
            reference: The definition.
            faster: Name and code of a faster implementation by device kind ("cpu", "cuda"); the
                code may be `Deferred`.
        """
        self.name = name
        self._reference = reference
        self._faster: dict[str, dict[str, Implementation | Deferred]] = {
            kind: {own: found} for kind, (own, found) in (faster or {}).items()
        }
        self._chosen: dict[str, Implementation] = {}
        _operations[name] = self  # type: ignore[assignment]  # callables of any signature

    def on(self, device: torch.device) -> Implementation:
        """
        Return the implementation for a device; the first call per device kind chooses and logs it.

        Raises:
            TritonMissing: The choice needs Triton, which is not installed; no other implementation
                is chosen instead.
            ValueError: `configure` named an implementation that this device kind does not have.
        """
        chosen = self._chosen.get(device.type)
        if chosen is None:
            chosen = self._chosen[device.type] = self._choose(device.type)
        return chosen

    def offer(self, kind: str, name: str, implementation: Implementation | Deferred) -> None:
        """
        Add an implementation that only some machines can run, as a device kind's default from now
        on.

        Args:
            kind: Device kind.
            name: Name of the implementation; one offered under this name before is replaced.
            implementation: Code to run.
        """
        self.withdraw(kind, name)
        self._faster.setdefault(kind, {})[name] = implementation

    def withdraw(self, kind: str, name: str) -> None:
        """Take back an offer, if there was one; the device kind gets its earlier default."""
        self._faster.get(kind, {}).pop(name, None)
        self.forget()

    def forget(self) -> None:
        """Choose again at the next call of `on`."""
        self._chosen.clear()

    def _choose(self, kind: str) -> Implementation:
        available: dict[str, Implementation | Deferred] = {
            REFERENCE: self._reference,
            **self._faster.get(kind, {}),
        }
        name = _choices.get(self.name, list(available)[-1])
        if name not in available:
            raise ValueError(
                f"{self.name} has no implementation {name!r} for {kind}; "
                f"available: {', '.join(sorted(available))}"
            )
        found = available[name]
        chosen = self._load(found, kind) if isinstance(found, Deferred) else found
        _log.info("kernel_chosen", operation=self.name, device=kind, implementation=name)
        return chosen

    def _load(self, deferred: Deferred, kind: str) -> Implementation:
        try:
            module = importlib.import_module(deferred.module)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "triton":
                raise
            raise TritonMissing(
                f"{self.name} on {kind} needs Triton, which is not installed: install "
                f"tandem-serve[gpu], or choose the slow definition with "
                f"configure({{{self.name!r}: {REFERENCE!r}}})"
            ) from error
        return cast("Implementation", getattr(module, deferred.attribute))


def configure(choices: Mapping[str, str]) -> None:
    """
    Fix implementations by operation name, for example `{"paged_attention": "reference"}`; other
    operations choose by device.

    Raises:
        ValueError: An operation does not exist. An implementation that does not exist raises when
            it is first needed.
    """
    for name in choices:
        if name not in _operations:
            raise ValueError(f"no operation {name!r}; known: {', '.join(sorted(_operations))}")
    _choices.clear()
    _choices.update(choices)
    for operation in _operations.values():
        operation.forget()
