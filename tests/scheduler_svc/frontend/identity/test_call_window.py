"""How many calls are served at a time while the event loop is late."""

from __future__ import annotations

import pytest

from scheduler_svc.frontend.identity.call_window import GUARD_S, LATE_S, CallWindow, num_kept

LATE = 2 * LATE_S
IN_TIME = LATE_S / 2


class Clock:
    """A clock that the test moves."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def window(clock) -> CallWindow:
    return CallWindow(256, clock)


def test_window_is_open_without_tenants_with_few(window):
    """
    As long as no tenant with few calls begins one, all places may be taken, late or not.
    """
    for _ in range(1000):
        window.note_timer(LATE)
    assert window.is_open("greedy", 10_000)


def test_window_holds_for_a_second_after_a_tenant_with_few(window, clock):
    """
    A call of a tenant with few closes the window above its size, for GUARD_S each time.
    """
    window.guard("polite")
    assert window.is_open("greedy", 63)
    assert not window.is_open("greedy", 64)
    clock.now_s += GUARD_S / 2
    window.guard("polite")
    clock.now_s += 0.9 * GUARD_S
    assert not window.is_open("greedy", 64)
    clock.now_s += 0.1 * GUARD_S
    assert window.is_open("greedy", 64)


def test_tenant_is_not_held_for_itself(window, clock):
    """
    A tenant that had few and now has many may take all places, unless another was guarded
    meanwhile, however often it was guarded itself.
    """
    window.guard("greedy")
    assert window.is_open("greedy", 256)
    assert not window.is_open("other", 256)
    window.guard("polite")
    window.guard("greedy")
    window.guard("greedy")
    assert not window.is_open("greedy", 256)
    clock.now_s += GUARD_S
    assert window.is_open("greedy", 256)


@pytest.mark.parametrize(("num_places", "num_left"), [(1, 0), (2, 1), (15, 1), (16, 2), (256, 32)])
def test_an_eighth_is_kept_but_one_at_least_and_never_all(num_places, num_left):
    """
    Tenants with few and those with many always find an eighth of the places beside the others, at
    least one of several.
    """
    assert num_left == num_kept(num_places)


def test_late_timers_shrink_it_to_an_eighth_of_the_places(window):
    """
    However late the loop is, an eighth of the places is left to tenants with many.
    """
    window.guard("polite")
    window.note_timer(LATE)
    assert 62.08 == pytest.approx(window.size, rel=1e-9)  # 3 % less; float arithmetic
    for _ in range(1000):
        window.note_timer(LATE)
    assert 32 == window.size
    assert window.is_open("greedy", 31)


def test_timers_in_time_let_it_grow_to_all_places(window):
    """
    A loop that is in time gives every place back, by and by.
    """
    window.note_timer(IN_TIME)
    assert 64.1 == window.size
    for _ in range(2000):
        window.note_timer(IN_TIME)
    assert 256 == window.size


@pytest.mark.parametrize(("lateness", "grows"), [(40, True), (10, False)])
def test_it_settles_where_one_timer_in_twenty_is_late(window, lateness, grows):
    """
    With a timer late more seldom it grows, and with one late more often it shrinks.
    """
    before = window.size
    for number in range(10 * lateness):
        window.note_timer(IN_TIME if number % lateness else LATE)
    assert grows == (window.size > before)


def test_one_place_is_always_open(clock):
    """
    A service with a single place serves one call at a time.
    """
    window = CallWindow(1, clock)
    window.guard("polite")
    for _ in range(10):
        window.note_timer(LATE)
    assert window.is_open("greedy", 0)
    assert not window.is_open("greedy", 1)
