"""Promises that the core keeps whatever happens, in whatever order."""

from __future__ import annotations

import pytest

from tests.scheduler_svc.core.properties.core_machine import check


class TestProperties:
    def test_any_history_keeps_every_promise(self):
        """
        Limits hold, nothing leaks or starves, and tokens are exact under any options and mix of
        events.
        """
        check(examples=40, steps=25)

    @pytest.mark.slow
    def test_long_histories_keep_every_promise(self):
        """
        The same holds over longer histories.
        """
        check(examples=36, steps=60)
