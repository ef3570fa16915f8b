"""
Which implementation of each operation runs where: chosen once per operation and device kind,
logged, never changed.
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

_log = structlog.get_logger(__name__)
_choices: dict[str, str] = {}
_operations: dict[str, Operation[Callable[..., object]]] = {}


class TritonMissing(RuntimeError):
    """A device was chosen whose kernels are Triton's, and Triton is not installed."""


@dataclass(frozen=True, slots=True)
class Deferred:
    """
    Code that is imported when a device first needs it, because its module imports Triton.

    `module` is the module's whole name, `attribute` the function in it.
    """

    module: str
    attribute: str


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
        faster: Mapping[str, tuple[str, Implementation | Deferred]] | None = None,
    ) -> None:
        """
        Args:
            name: Of the operation, its folder's.
            reference: The definition.
            faster: By device kind ("cpu", "cuda"), the name and code of what to run instead, or
                where that code is.
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
        The implementation for a device; the first question per device kind decides and logs.

        Raises:
            TritonMissing: The choice needs Triton. Nothing else is chosen instead.
            ValueError: `configure` asked for what this device kind does not have.
        """
        chosen = self._chosen.get(device.type)
        if chosen is None:
            chosen = self._chosen[device.type] = self._choose(device.type)
        return chosen

    def offer(self, kind: str, name: str, implementation: Implementation | Deferred) -> None:
        """
        Add what only some machines can run to a device kind, as what it gets from now on.

        Args:
            kind: Of device.
            name: Of the implementation; one offered by this name before is replaced.
            implementation: What to run.
        """
        self.withdraw(kind, name)
        self._faster.setdefault(kind, {})[name] = implementation

    def withdraw(self, kind: str, name: str) -> None:
        """Take back an offer, if there was one; the kind gets what it had before."""
        self._faster.get(kind, {}).pop(name, None)
        self.forget()

    def forget(self) -> None:
        """Decide again at the next question."""
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
