"""Suspension as state: what was asked for, what the executor knows, and the command in between."""

from __future__ import annotations

import pytest

from scheduler_svc.core.state.suspension import Suspension
from tandem.errors import InternalError
from tandem.link.commands import KvMode


class TestSuspension:
    def test_it_is_in_force_until_the_executor_knows_of_its_end(self):
        """
        A suspension begins when it is asked for and ends when the executor is told to resume.
        """
        suspension = Suspension()
        seen = [(suspension.is_in_force, suspension.is_command_due)]
        for move in (
            lambda: suspension.begin(KvMode.OFFLOAD),
            suspension.note_told,
            suspension.end,
            suspension.note_resumed,
        ):
            move()
            seen.append((suspension.is_in_force, suspension.is_command_due))
        assert [(False, False), (True, True), (True, False), (True, True), (False, False)] == seen

    def test_one_that_ends_before_the_executor_knew_needs_no_command(self):
        """
        A suspension that ended before its command was sent is not in force, and no command is due.
        """
        suspension = Suspension()
        suspension.begin(KvMode.PERSIST)
        suspension.end()
        assert (False, False) == (suspension.is_in_force, suspension.is_command_due)

    @pytest.mark.parametrize("mode", list(KvMode))
    def test_only_dropped_kv_forbids_live_slots(self, mode):
        """
        Slots stay live in a suspension, except in the one that drops their KV, once it is sent.
        """
        suspension = Suspension()
        suspension.begin(mode)
        suspension.check_integrity(3)
        suspension.note_told()
        suspension.check_integrity(0)
        if mode is KvMode.RECOMPUTE:
            with pytest.raises(InternalError, match="a suspension dropped"):
                suspension.check_integrity(1)
        else:
            suspension.check_integrity(1)
