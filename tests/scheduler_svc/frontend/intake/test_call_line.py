"""The order in which calls that wait are served."""

from __future__ import annotations

import pytest

from scheduler_svc.frontend.calls.call_line import CallLine


@pytest.fixture
def line() -> CallLine[str]:
    return CallLine()


def taken(line: CallLine[str], held: tuple[str, ...] = ()) -> list[str]:
    """Take calls until none may begin."""
    found = []
    while (call := line.take(lambda caller: caller not in held)) is not None:
        found.append(call)
    return found


def test_callers_take_turns(line):
    """
    A caller's calls keep their order; a caller with one does not wait for all of another's.
    """
    for number in range(3):
        line.add("greedy", f"greedy {number}")
    line.add("polite", "polite 0")
    assert 4 == len(line)
    assert ["greedy 0", "polite 0", "greedy 1", "greedy 2"] == taken(line)
    assert 0 == len(line)


def test_turn_goes_on_where_it_was(line):
    """
    A caller that has just had its turn, and calls again, goes behind the others.
    """
    for caller in ("a", "b"):
        line.add(caller, f"{caller} 0")
        line.add(caller, f"{caller} 1")
    assert "a 0" == line.take(lambda _: True)
    line.add("a", "a 2")
    assert ["b 0", "a 1", "b 1", "a 2"] == taken(line)


def test_caller_that_may_not_begin_keeps_its_turn(line):
    """
    Calls that are held back stay, in their order and place, and others pass.
    """
    line.add("held", "held 0")
    line.add("a", "a 0")
    line.add("held", "held 1")
    line.add("a", "a 1")
    assert ["a 0", "a 1"] == taken(line, held=("held",))
    line.add("a", "a 2")
    assert ["held 0", "a 2", "held 1"] == taken(line)


def test_callers_may_be_nobody(line):
    """
    None is a caller like others.
    """
    nobodys: CallLine[str] = CallLine()
    nobodys.add(None, "a call")
    assert nobodys.take(lambda _: False) is None
    assert "a call" == nobodys.take(lambda _: True)


def test_all_are_taken_at_the_end(line):
    """
    The end of a line gives every call once.
    """
    for caller in ("a", "b", "a"):
        line.add(caller, caller)
    assert ["a", "a", "b"] == sorted(line.take_all())
    assert [] == taken(line)
    assert [] == line.take_all()
