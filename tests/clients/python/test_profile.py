"""Traces of steps as operators get them: in library and command."""

from __future__ import annotations

import gzip
import hashlib

import pytest
from typer.testing import CliRunner

from tandem.admin.v1.admin_service_pb2 import ProfileResponse
from tandem.common.v1 import profile_pb2
from tandem.errors import CorruptMessage, ExecutorLost, ProfileRunning
from tandem_client import AdminClient, ProfileProgress
from tandem_client.cli.app import app
from tandem_client.cli.shared.failures import ExitCode

TRACE = gzip.compress(b'{"traceEvents": []}')


def progress(num_steps, elapsed_s, *, is_recorded=False):
    said = profile_pb2.ProfileProgress(
        num_steps=num_steps, elapsed_s=elapsed_s, is_recorded=is_recorded
    )
    return ProfileResponse(progress=said)


def part(chunk, sha256=""):
    return ProfileResponse(trace=profile_pb2.TraceChunk(chunk=chunk, sha256=sha256))


def whole(num_steps=3):
    """All messages of a profile that went well."""
    return [
        progress(0, 0.0),
        progress(num_steps, 1.5, is_recorded=True),
        part(TRACE[:7]),
        part(TRACE[7:]),
        part(b"", hashlib.sha256(TRACE).hexdigest()),
    ]


@pytest.fixture
def run(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments):
        command = ["profile", *arguments, "--admin-address", server.address]
        return CliRunner().invoke(app, command, env={"COLUMNS": "200"})

    return invoke


class TestProfile:
    def test_trace_is_put_together(self, server):
        """
        A profile has the bytes of all chunks, the last count of steps and what was told on the way.
        """
        server.seen.profile = whole()
        told = []
        with AdminClient(server.address) as admin:
            profile = admin.profile(num_steps=3, with_stack=True, on_progress=told.append)
        assert (TRACE, 3, 1.5) == (profile.trace, profile.num_steps, profile.elapsed_s)
        assert [
            ProfileProgress(num_steps=0, elapsed_s=0.0, is_recorded=False),
            ProfileProgress(num_steps=3, elapsed_s=1.5, is_recorded=True),
        ] == told
        asked = server.seen.profiled[0].options
        assert (3, True, False) == (asked.num_steps, asked.with_stack, asked.record_shapes)
        assert not asked.HasField("duration_s")

    @pytest.mark.parametrize(
        "messages",
        [whole()[:-1], [*whole()[:-2], whole()[-1]], [progress(1, 1.0)]],
        ids=["no-end", "part-missing", "no-trace"],
    )
    def test_trace_that_is_not_whole_is_an_error(self, server, messages):
        """
        A trace without its checksum, or not of it, is never taken for one.
        """
        server.seen.profile = messages
        with AdminClient(server.address) as admin, pytest.raises(CorruptMessage):
            admin.profile()

    @pytest.mark.parametrize("error", [ProfileRunning("busy"), ExecutorLost("gone")])
    def test_failure_is_typed_and_not_tried_again(self, server, error):
        """
        An error that ends a profile is raised as it is, and the profile is not recorded again.
        """
        server.seen.profile = [progress(1, 0.5), error]
        with AdminClient(server.address) as admin, pytest.raises(type(error)):
            admin.profile()
        assert 1 == len(server.seen.profiled)


class TestCommand:
    def test_trace_becomes_a_file(self, server, run, tmp_path):
        """
        `tandem profile` writes the trace and says how much is in it; progress goes to stderr.
        """
        server.seen.profile = whole()
        result = run("--steps", "3", "--duration-s", "2.5", "-o", "out.json.gz")
        assert 0 == result.exit_code
        assert TRACE == (tmp_path / "out.json.gz").read_bytes()
        assert "out.json.gz: 3 steps in 1.5 s, 0.0 MiB\n" == result.stdout
        assert "writing the trace of 3 steps\n" == result.stderr
        asked = server.seen.profiled[0].options
        assert (3, 2.5) == (asked.num_steps, asked.duration_s)

    def test_idle_server_is_pointed_out_once(self, server, run, tmp_path):
        """
        A profile without a step says so once while it waits, fails, and leaves no file.
        """
        waiting = [progress(0, 0.5 * count) for count in range(6)]
        server.seen.profile = [*waiting, *whole(num_steps=0)]
        result = run()

        assert [
            "no step has run yet: send requests",
            "tandem: nothing was recorded: no step ran in 1.5 s. Send requests while it records",
        ] == result.stderr.splitlines()
        assert (ExitCode.FAILED, "", []) == (
            result.exit_code,
            result.stdout,
            list(tmp_path.iterdir()),
        )

    def test_each_number_of_steps_is_said_once(self, server, run):
        """
        Progress is told where the number of steps has changed.
        """
        steps = [progress(count // 2, 0.25 * count) for count in range(8)]
        server.seen.profile = [*steps, *whole()]

        assert [
            "recording: 1 step",
            "recording: 2 steps",
            "recording: 3 steps",
            "writing the trace of 3 steps",
        ] == run().stderr.splitlines()

    @pytest.mark.parametrize(
        ("output", "said"),
        [("missing/trace.json.gz", "there is no folder missing"), (".", ". is a folder")],
    )
    def test_wrong_folder_is_found_before_recording(self, server, run, output, said):
        """
        A file that there cannot be is refused before anything is recorded.
        """
        result = run("-o", output)
        assert (ExitCode.USAGE, []) == (result.exit_code, server.seen.profiled)
        assert said in result.stderr

    def test_full_disk_is_told_with_the_file(self, server, run):
        """
        A trace that finds no room says so in one line that names the file.
        """
        server.seen.profile = whole()
        result = run("-o", "/dev/full")
        assert ExitCode.FAILED == result.exit_code
        assert "/dev/full: the trace cannot be written: No space left on device" in result.stderr

    def test_refusal_leaves_no_file(self, server, run, tmp_path):
        """
        A profile that fails says why in one line, and no file is left.
        """
        server.seen.profile = [ProfileRunning("a profile is being recorded already")]
        result = run()
        assert ExitCode.REFUSED == result.exit_code
        assert "tandem: PROFILE_RUNNING: a profile is being recorded already\n" == result.stderr
        assert [] == list(tmp_path.iterdir())
