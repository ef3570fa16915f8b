"""Reasons why executors that answer cannot be used, which only an operator can change."""

from __future__ import annotations

from scheduler_svc.executor_client.description import ExecutorDescription
from scheduler_svc.executor_client.link_events import ConnectFailed
from tandem.errors import ModelChanged


class Refusals:
    """Latest refusal of each address since a stream was attached. Owned by the session."""

    def __init__(self) -> None:
        self._by_address: dict[str, str] = {}
        self._fenced_by = ""
        self._other_models: dict[str, ExecutorDescription] = {}

    @property
    def other_model(self) -> ExecutorDescription | None:
        """An executor that, when last asked, served another model than requests need."""
        return next(iter(self._other_models.values()), None)

    @property
    def text(self) -> str:
        """Refusals in words; empty when there is none."""
        if not self._by_address and not self._fenced_by:
            return ""
        refused = "; ".join(
            message if len(self._by_address) == 1 or not address else f"{address}: {message}"
            for address, message in self._by_address.items()
        )
        if not self._fenced_by:
            return refused
        fenced = (
            f"scheduler {self._fenced_by} has taken the executor over; this one waits until that "
            "one's lease has ended"
        )
        return f"{fenced}: {refused}" if refused else fenced

    @property
    def is_fenced(self) -> bool:
        """True from the loss of a session to another scheduler until the next one is attached."""
        return bool(self._fenced_by)

    def note(self, failed: ConnectFailed) -> None:
        """Note a failure at an address; one that may pass by itself clears the refusal there."""
        if failed.error.code == "FAILED_PRECONDITION":
            self._by_address[failed.address] = failed.error.message
        else:
            self._by_address.pop(failed.address, None)
        self._other_models.pop(failed.address, None)
        if isinstance(failed.error, ModelChanged) and failed.description is not None:
            self._other_models[failed.address] = failed.description

    def fenced_by(self, holder: str) -> None:
        """Note that another scheduler took the session."""
        self._fenced_by = holder

    def clear(self) -> None:
        """Forget all refusals when a stream is attached."""
        self._by_address.clear()
        self._fenced_by = ""
        self._other_models.clear()
