"""`tandem executors`, and the calls of the library behind it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tandem.admin.v1 import executors_pb2
from tandem.errors import InvalidParameter
from tandem_client import NO_RETRY, AdminClient, AsyncAdminClient, ExecutorState
from tandem_client.cli.app import app
from tandem_client.cli.shared.executor_words import meaning_of
from tests.clients.python.fake_admin import EXECUTORS


@pytest.fixture
def admin(server):
    server.seen.executors = list(EXECUTORS)
    with AdminClient(server.address, retry=NO_RETRY) as connected:
        yield connected


@pytest.fixture
def run(server):
    server.seen.executors = list(EXECUTORS)

    def invoke(*arguments):
        return CliRunner().invoke(
            app,
            ["executors", *arguments, "--admin-address", server.address],
            env={"COLUMNS": "200"},
        )

    return invoke


class TestClient:
    def test_executors_are_plain_values(self, admin):
        """
        Each executor has every field of the contract, under the same name.
        """
        found = admin.executors()
        names = [field.name for field in executors_pb2.ExecutorSummary.DESCRIPTOR.fields]
        assert [[getattr(one, name) for name in names] for one in EXECUTORS] == [
            [getattr(one, name) for name in names] for one in found
        ]
        assert [ExecutorState.SERVING, ExecutorState.REFUSED] == [one.state for one in found]

    def test_changes_are_sent(self, admin, server):
        """
        Adding, draining and removing send the address; a drain has 30 s unless told otherwise.
        """
        admin.add_executor("box:9")
        assert 3 == admin.drain_executor("box:1")
        admin.drain_executor("box:1", 0.0)
        admin.drain_executor("box:1", None)
        admin.remove_executor("box:1")
        assert [
            ("add", "box:9", None),
            ("drain", "box:1", 30.0),
            ("drain", "box:1", 0.0),
            ("drain", "box:1", None),
            ("remove", "box:1", None),
        ] == server.seen.executor_changes

    async def test_asyncio_has_the_same_calls(self, server):
        """
        The client for asyncio sends and returns the same.
        """
        server.seen.executors = list(EXECUTORS)
        async with AsyncAdminClient(server.address, retry=NO_RETRY) as admin:
            assert ["box:1", "box:2"] == [one.address for one in await admin.executors()]
            await admin.add_executor("box:9")
            assert 3 == await admin.drain_executor("box:1", grace_s=1.5)
            await admin.remove_executor("box:1")
        assert [("add", "box:9", None), ("drain", "box:1", 1.5), ("remove", "box:1", None)] == (
            server.seen.executor_changes
        )

    def test_executor_that_is_named_already_is_refused(self, admin):
        """
        The server's refusal is the class of its reason, with the field.
        """
        with pytest.raises(InvalidParameter, match="box:1 is named already") as refused:
            admin.add_executor("box:1")
        assert "address" == refused.value.field

    def test_states_are_the_contracts(self):
        """
        Each state of the contract is known here by the same number; a newer one is UNSPECIFIED.
        """
        prefix = "EXECUTOR_STATE_"
        contract = {
            name.removeprefix(prefix): number
            for name, number in executors_pb2.ExecutorState.items()
        }
        assert contract == {one.name: one.value for one in ExecutorState}
        assert ExecutorState.UNSPECIFIED == ExecutorState(99)


class TestList:
    def test_list_is_a_table(self, run):
        """
        Each executor has a line with its state, load and whatever is unusual about it.
        """
        heading, first, second = run().stdout.splitlines()
        names = "executor state requests blocks cached steps per step lost away device model"
        assert names.split() == heading.split()[:12]
        for text in ("box:1", "serving", "2/32", "50/200", "1,234", "12.5 ms", "cpu", "box:3"):
            assert text in first
        for text in ("box:2", "refused", "12 s", "it serves another model"):
            assert text in second

    def test_column_without_content_is_left_out(self, run, server):
        """
        Where nothing is unusual no column is there to say so.
        """
        server.seen.executors = [
            executors_pb2.ExecutorSummary(
                address="box:1", reached_at="box:1", state=executors_pb2.EXECUTOR_STATE_SERVING
            )
        ]
        heading = run().stdout.splitlines()[0]
        assert ["executor", "state", "requests", "blocks", "cached", "steps"] == heading.split()

    def test_none_is_said(self, run, server):
        """
        Without an executor a sentence says so.
        """
        server.seen.executors = []
        assert "no executor is named now" in run().stdout
        assert {"executors": []} == json.loads(run("--json").stdout)

    def test_json_is_only_json(self, run):
        """
        --json prints one object with every field, and names for states.
        """
        first, second = json.loads(run("--json").stdout)["executors"]
        names = {field.name for field in executors_pb2.ExecutorSummary.DESCRIPTOR.fields}
        assert names == set(first)
        assert ("SERVING", 1_234, "REFUSED") == (first["state"], first["steps"], second["state"])


class TestChange:
    @pytest.mark.parametrize(
        ("arguments", "change", "said"),
        [
            (["add", "box:9"], ("add", "box:9", None), "box:9 is added; tandem executors tells"),
            (["drain", "box:1"], ("drain", "box:1", 30.0), "box:1 is drained; 3 moved."),
            (["drain", "box:1", "--grace-s=0"], ("drain", "box:1", 0.0), "box:1 is drained; "),
            (["remove", "box:1"], ("remove", "box:1", None), "box:1 is removed."),
        ],
        ids=["add", "drain", "drain at once", "remove"],
    )
    def test_one_executor_is_changed(self, run, server, arguments, change, said):
        """
        The command sends the change, and says in one line that it is done.
        """
        result = run(*arguments)
        assert (0, [change]) == (result.exit_code, server.seen.executor_changes)
        assert result.stdout.startswith(said)
        assert 1 == result.stdout.count("\n")

    def test_json_says_what_moved(self, run):
        """
        With --json a change prints one object.
        """
        assert {"address": "box:1", "moved_requests": 3} == json.loads(
            run("drain", "box:1", "--json").stdout
        )

    def test_refusal_is_one_line(self, run):
        """
        A refusal by the server ends the command with its sentence and exit code 4.
        """
        result = run("add", "box:1")
        assert (4, "tandem: INVALID_PARAMETER: box:1 is named already\n") == (
            result.exit_code,
            result.stderr,
        )

    @pytest.mark.parametrize(
        "arguments",
        [["drain"], ["stop", "box:1"], ["add", "box:9", "--grace-s=1"], ["--grace-s=1"]],
        ids=["no address", "no action", "grace of add", "grace of the list"],
    )
    def test_wrong_use_changes_nothing(self, run, server, arguments):
        """
        A missing address, an unknown action and a grace where there is none are wrong usage.
        """
        assert (2, []) == (run(*arguments).exit_code, server.seen.executor_changes)


class TestMeaning:
    @pytest.mark.parametrize(
        ("values", "said"),
        [
            ({"state": 1}, "serves"),
            ({"state": 1, "reached_at": "b:1"}, "serves (by b:1, which stands by)"),
            ({"state": 6, "away_s": 3.4}, "has not been reached for 3 s"),
            ({"state": 6, "away_s": 3.4, "sessions": 1}, "was lost and is not back for 3 s"),
            ({"state": 7, "why": "another model"}, "is not used: another model"),
            ({"state": 99}, "is in a state that this version does not know"),
        ],
    )
    def test_state_is_told_in_words(self, admin, server, values, said):
        """
        Each state has its sentence, with what is known of the reason.
        """
        server.seen.executors = [executors_pb2.ExecutorSummary(address="a:1", **values)]
        (one,) = admin.executors()
        assert said == meaning_of(one)
