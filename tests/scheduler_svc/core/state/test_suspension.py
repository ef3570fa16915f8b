"""Suspension as state: what was asked for, what the executor knows, and the command in between."""

from __future__ import annotations

from scheduler_svc.core.state.suspension import Suspension
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
