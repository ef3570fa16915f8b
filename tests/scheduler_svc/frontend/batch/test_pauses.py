"""Pauses between the events of items that ask for them."""

from __future__ import annotations

import pytest

from scheduler_svc.frontend.batch.item import TOGETHER_S, due_after


@pytest.mark.parametrize("pause_s", [0.002, 0.01, 0.04, 2.5])
@pytest.mark.parametrize("now_s", [0.0, 12.3456, 1e6 + 0.007])
def test_pause_is_kept_and_hardly_longer(now_s, pause_s):
    """
    An item is never early, and at most 10 ms or its own pause late.
    """
    waits_s = due_after(now_s, pause_s) - now_s
    assert pause_s - 1e-6 <= waits_s <= pause_s + min(pause_s, TOGETHER_S) + 1e-6


def test_items_are_due_together():
    """
    Items whose last events were milliseconds apart are due at the same time.
    """
    assert due_after(5.0001, 0.04) == due_after(5.0092, 0.04)
