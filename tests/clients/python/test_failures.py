"""Exit codes: what a script can tell from how a command ended."""

from __future__ import annotations

import pytest

from tandem import errors
from tandem_client.cli.failures import ExitCode, exit_code_of


class TestExitCodes:
    @pytest.mark.parametrize(
        ("error", "expected"),
        [
            (errors.PromptTooLong("too long"), ExitCode.REFUSED),
            (errors.RequestNotFound("no such request"), ExitCode.REFUSED),
            (errors.QueueFull("full"), ExitCode.OVERLOADED),
            (errors.Draining("draining"), ExitCode.UNAVAILABLE),
            (errors.ModelChanged("another model"), ExitCode.UNAVAILABLE),
            (errors.InvalidConfig("wrong key"), ExitCode.USAGE),
            (errors.InternalError("a bug"), ExitCode.FAILED),
        ],
        ids=lambda value: getattr(value, "reason", None),
    )
    def test_error_has_its_exit_code(self, error, expected):
        """
        The code says who has to act: the caller, the operator, or nobody but time.
        """
        assert expected == exit_code_of(error)
