"""The gate of an executor, and what it tells the router."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.routing.router import Router
from scheduler_svc.core.state.gate import AdmissionGate
from tandem.link.commands import KvMode

Move = Callable[[AdmissionGate], None]


def suspend(gate: AdmissionGate) -> None:
    gate.suspend(KvMode.PERSIST)


def fill(gate: AdmissionGate) -> None:
    gate.note_full(1)


@pytest.mark.parametrize(
    ("before", "move"),
    [
        ([], AdmissionGate.note_away),
        ([AdmissionGate.note_away], AdmissionGate.note_back),
        ([], AdmissionGate.close),
        ([], fill),
        ([fill], AdmissionGate.reopen),
        ([], suspend),
        ([suspend], AdmissionGate.note_suspended),
        ([suspend, AdmissionGate.note_suspended], AdmissionGate.resume),
        ([suspend, AdmissionGate.note_suspended, AdmissionGate.resume], AdmissionGate.note_resumed),
    ],
)
def test_router_forgets_what_it_found_at_each_change_of_a_gate(before: list[Move], move: Move):
    """
    A change of the gate of an executor ends what plans of this moment found.
    """
    router = Router(CoreOptions())
    gate = AdmissionGate(router)
    for each in before:
        each(gate)
    router.precedents.note(0, 7, 1)
    assert [1] == list(router.precedents.find(0, 7))
    move(gate)
    assert [] == list(router.precedents.find(0, 7))


def test_gate_that_is_open_keeps_what_the_router_found():
    """
    To open a gate that is open changes nothing, so that requests which run and end cost no search.
    """
    router = Router(CoreOptions())
    gate = AdmissionGate(router)
    router.precedents.note(0, 7, 1)
    gate.reopen()
    assert [1] == list(router.precedents.find(0, 7))
