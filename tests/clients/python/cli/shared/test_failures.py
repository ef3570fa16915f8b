"""Exit codes: what a script can tell from how a command ended."""

from __future__ import annotations

import errno
import os

import pytest
import typer

from tandem import errors
from tandem.status import PeerUnavailable
from tandem_client.cli.shared.failures import ExitCode, describe, exit_code_of, readable_errors


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
            (errors.InvalidModel("no config.json"), ExitCode.USAGE),
            (errors.OutOfMemory("too many blocks"), ExitCode.USAGE),
            (errors.OutOfMemory("alone", metadata={"tokens_emitted": "0"}), ExitCode.REFUSED),
            (errors.ProfileRunning("another one runs"), ExitCode.REFUSED),
            (errors.ProfileUnsupported("no model"), ExitCode.REFUSED),
            (errors.EventsNotTracked("not kept"), ExitCode.REFUSED),
            (errors.InternalError("a bug"), ExitCode.FAILED),
        ],
        ids=lambda value: getattr(value, "reason", None),
    )
    def test_error_has_its_exit_code(self, error, expected):
        """
        The exit code says if the caller or the operator has to act, or if time alone helps.
        """
        assert expected == exit_code_of(error)

    @pytest.mark.parametrize(
        ("error", "said", "expected"),
        [
            (
                OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
                "tandem: cannot write the output: No space left on device\n",
                ExitCode.FAILED,
            ),
            (
                FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "prompts.jsonl"),
                "tandem: prompts.jsonl: No such file or directory\n",
                ExitCode.USAGE,
            ),
        ],
        ids=["full disk", "missing file"],
    )
    def test_system_error_says_what_failed(self, capsys, error, said, expected):
        """
        A full disk under the output is no wrong usage, a file that is not there is; the line names either.
        """

        @readable_errors
        def command() -> None:
            raise error

        with pytest.raises(typer.Exit) as caught:
            command()
        assert expected == caught.value.exit_code
        assert said == capsys.readouterr().err

    @pytest.mark.parametrize(
        ("message", "why"),
        [
            ("failed to connect: addr: ipv4:127.0.0.1:1: Connection refused", "Connection refused"),
            (
                "[DNS resolution failed for nonsense: Domain name not found]",
                "Domain name not found",
            ),
            (
                "Stream removed (GOAWAY received; Error code: 2; Debug Text: )",
                "Stream removed (GOAWAY received; Error code: 2; Debug Text: )",
            ),
        ],
    )
    def test_unreachable_server_is_told_with_the_last_cause(self, message, why):
        """
        The line keeps the last of gRPC's chain of causes, or all where that says nothing, and says
        what to do.
        """
        said = describe(PeerUnavailable(message), "nonsense")
        assert f"cannot reach nonsense: {why}. Is it running? Start one with: tandem up" == said
