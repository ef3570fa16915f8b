"""Questions of operators: requests, their events, the prefix cache; in library and command."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tandem.admin.v1 import admin_service_pb2, requests_pb2
from tandem.errors import EventsNotTracked, RequestNotFound
from tandem_client import (
    NO_RETRY,
    AdminClient,
    BlockStats,
    KvMode,
    RequestEventKind,
    RequestState,
)
from tandem_client.cli.app import app


@pytest.fixture
def admin(server):
    with AdminClient(server.address, retry=NO_RETRY) as connected:
        yield connected


@pytest.fixture
def run(server):
    def invoke(*arguments, columns=200):
        return CliRunner().invoke(
            app, [*arguments, "--admin-address", server.address], env={"COLUMNS": str(columns)}
        )

    return invoke


class TestAdminClient:
    def test_requests_are_plain_values(self, admin, server):
        """
        Each entry has every field of the contract; a missing first token is None.
        """
        found = admin.list_requests(
            page_size=5, tenant="", states=[RequestState.DECODE, RequestState.WAITING]
        )
        first, second = found.requests
        assert ("first", RequestState.DECODE, "alice", -1, 30, 16, 4, 2, 0.5) == (
            first.request_id,
            first.state,
            first.tenant,
            first.priority,
            first.prompt_tokens,
            first.cached_tokens,
            first.output_tokens,
            first.preemptions,
            first.time_to_first_token_s,
        )
        assert (1, RequestState.WAITING, None) == (
            second.choice,
            second.state,
            second.time_to_first_token_s,
        )
        assert 7 == found.total
        asked = server.seen.listed[0]
        assert (5, True, "", [3, 1]) == (
            asked.page_size,
            asked.HasField("tenant"),
            asked.tenant,
            list(asked.states),
        )

    def test_unset_choices_are_left_to_the_server(self, admin, server):
        """
        Without arguments nothing is asked for but the list.
        """
        admin.list_requests()
        assert requests_pb2.ListRequestsRequest() == server.seen.listed[0]

    def test_all_pages_are_iterated(self, admin, server):
        """
        `iter_requests` asks for page after page with the same choice, and only as far as it is read.
        """
        server.seen.live = [requests_pb2.RequestSummary(request_id=str(i)) for i in range(5)]
        states = iter([RequestState.DECODE])
        found = admin.iter_requests(page_size=2, tenant="t", states=states)
        assert ["0", "1"] == [next(found).request_id, next(found).request_id]
        assert 1 == len(server.seen.listed)
        assert ["2", "3", "4"] == [one.request_id for one in found]
        assert [("", 2, "t", [3]), ("2", 2, "t", [3]), ("4", 2, "t", [3])] == [
            (one.page_token, one.page_size, one.tenant, list(one.states))
            for one in server.seen.listed
        ]

    def test_page_says_where_the_next_begins(self, admin, server):
        """
        A page has the token of the next one; the last has none.
        """
        server.seen.live = [requests_pb2.RequestSummary(request_id=str(i)) for i in range(3)]
        first = admin.list_requests(page_size=2)
        last = admin.list_requests(page_size=2, page_token=first.next_page_token)
        assert [("2", 3, 2), ("", 3, 1)] == [
            (page.next_page_token, page.total, len(page.requests)) for page in (first, last)
        ]

    def test_operators_abort_of_any_tenant(self, admin, server):
        """
        `abort` names the tenant if it is given one, the empty one too; a dead id is not found.
        """
        for tenant in (None, "", "alice"):
            admin.abort("live", tenant=tenant)
        with pytest.raises(RequestNotFound):
            admin.abort("gone")
        assert [
            requests_pb2.AbortRequest(request_id="live"),
            requests_pb2.AbortRequest(request_id="live", tenant=""),
            requests_pb2.AbortRequest(request_id="live", tenant="alice"),
            requests_pb2.AbortRequest(request_id="gone"),
        ] == server.seen.aborted_by_operator

    def test_events_are_plain_values(self, admin):
        """
        Events come in order, with what their kind has and None for what it has not.
        """
        add, token, finish = admin.request_events("first")
        assert (RequestEventKind.ADD, None, None, None) == (
            add.kind,
            add.token_id,
            add.blocks,
            add.time_to_first_token_s,
        )
        blocks = BlockStats(used_blocks=1, cached_blocks=2, free_blocks=3)
        assert (70, blocks, 5) == (token.token_id, token.blocks, token.dropped_events)
        assert (RequestEventKind.FINISH, "EOS", 0.25) == (
            finish.kind,
            finish.detail,
            finish.time_to_first_token_s,
        )

    def test_tracking_that_is_off_is_its_own_error(self, admin):
        """
        A server that keeps no events raises EventsNotTracked.
        """
        with pytest.raises(EventsNotTracked):
            admin.request_events("untracked")

    def test_flush_returns_what_it_freed(self, admin, server):
        """
        Flushing returns the blocks it freed.
        """
        assert (12, 1) == (admin.flush_prefix_cache(), server.seen.num_flushes)

    def test_suspending_says_what_becomes_of_memory(self, admin, server):
        """
        Suspend sends its mode, or none, and returns the memory in use; resume takes it back.
        """
        assert 3 * 2**20 == admin.suspend(KvMode.OFFLOAD)
        admin.suspend()
        admin.resume()
        assert [2, 0, None] == server.seen.suspensions

    def test_newer_states_and_kinds_are_unspecified(self):
        """
        Numbers that this version does not know read as UNSPECIFIED.
        """
        assert RequestState.UNSPECIFIED == RequestState(99)
        assert RequestEventKind.UNSPECIFIED == RequestEventKind(99)

    @pytest.mark.parametrize(
        ("ours", "contract", "prefix"),
        [
            (RequestState, requests_pb2.RequestState, "REQUEST_STATE_"),
            (RequestEventKind, requests_pb2.RequestEventKind, "REQUEST_EVENT_KIND_"),
            (KvMode, admin_service_pb2.KvMode, "KV_MODE_"),
        ],
        ids=["states", "kinds", "modes"],
    )
    def test_names_and_numbers_are_the_contracts(self, ours, contract, prefix):
        """
        Each name of the contract is known here by the same number.
        """
        expected = {name.removeprefix(prefix): number for name, number in contract.items()}
        assert expected | {"UNSPECIFIED": 0} == {"UNSPECIFIED": 0} | {
            one.name: one.value for one in ours
        }


class TestRequestsCommand:
    def test_list_is_a_table(self, run):
        """
        The list shows the state of each request, and how many more there are.
        """
        result = run("requests")
        assert 0 == result.exit_code
        row = next(line for line in result.stdout.splitlines() if "first" in line)
        assert all(text in row for text in ("decode", "alice", "-1", "30", "16", "1.2 s"))
        assert "5 more; see --max" in result.stderr

    def test_ids_are_whole_in_a_narrow_terminal(self, run, server):
        """
        An id of any length is printed whole on one line, so that it can be pasted back.
        """
        long = "r" * 70
        server.seen.live = [
            requests_pb2.RequestSummary(request_id=long, tenant="t" * 30, prompt_tokens=9),
            requests_pb2.RequestSummary(request_id="b", state=requests_pb2.REQUEST_STATE_WAITING),
        ]
        lines = run("requests", columns=80).stdout.splitlines()

        assert ["request", "state", "tenant", "prompt", "output", "age"] == lines[0].split()
        assert long == lines[1].split()[0]
        assert ["b", "waiting", "0", "0", "0.0", "s"] == lines[2].split()

    def test_empty_system_is_said_to_be_empty(self, run, server):
        """
        Without a request, or without one that was asked for, a sentence says so.
        """
        server.seen.live = []

        assert "no request is in the system now\n" == run("requests").stdout
        assert "no such request is in the system now\n" == run("requests", "--tenant", "x").stdout
        assert {"requests": [], "total": 0} == json.loads(run("requests", "--json").stdout)

    def test_choices_are_sent(self, run, server):
        """
        Tenant, states and number reach the server.
        """
        run("requests", "--tenant", "t", "--state", "waiting", "--state", "paused", "--max", "3")
        asked = server.seen.listed[0]
        assert ("t", [1, 5], 3) == (asked.tenant, list(asked.states), asked.page_size)

    @pytest.mark.slow
    def test_more_than_a_page_is_shown(self, run, server):
        """
        --max beyond the largest page takes several, and no more than it needs.
        """
        server.seen.live = [requests_pb2.RequestSummary(request_id=str(i)) for i in range(20_010)]
        found = json.loads(run("requests", "--max", "20005", "--json").stdout)
        assert (20_005, 20_010) == (len(found["requests"]), found["total"])
        assert [("", 10_000), ("10000", 10_000), ("20000", 5)] == [
            (one.page_token, one.page_size) for one in server.seen.listed
        ]

    def test_json_is_only_json(self, run):
        """
        --json prints one object with names for numbers.
        """
        found = json.loads(run("requests", "--json").stdout)
        assert (7, ["DECODE", "WAITING"]) == (
            found["total"],
            [one["state"] for one in found["requests"]],
        )

    def test_events_of_one_request(self, run):
        """
        With an id its events are shown, and where some are not kept.
        """
        result = run("requests", "first")
        assert 0 == result.exit_code
        lines = result.stdout.splitlines()
        shown = [kind for kind in ("ADD", "GENERATED_TOKEN", "FINISH") if kind in result.stdout]
        assert ["ADD", "GENERATED_TOKEN", "FINISH"] == shown
        assert any("5 not kept" in line for line in lines)
        assert any("token 70" in line for line in lines)
        found = json.loads(run("requests", "first", "--json").stdout)
        assert ["ADD", "GENERATED_TOKEN", "FINISH"] == [one["kind"] for one in found]

    def test_tracking_that_is_off_is_one_line(self, run):
        """
        A command for events that are not kept says so in one line and exits with 4.
        """
        result = run("requests", "untracked")
        assert (4, "tandem: EVENTS_NOT_TRACKED: events of requests are not kept\n") == (
            result.exit_code,
            result.stderr,
        )

    def test_unknown_state_is_a_usage_error(self, run):
        """
        A state that does not exist is refused before anything is asked.
        """
        assert 2 == run("requests", "--state", "nowhere").exit_code


class TestCacheCommand:
    def test_flush_says_what_it_freed(self, run, server):
        """
        `tandem cache flush` prints the number of blocks.
        """
        result = run("cache", "flush")
        assert (0, "12 blocks freed\n", 1) == (
            result.exit_code,
            result.stdout,
            server.seen.num_flushes,
        )


class TestSuspendCommand:
    def test_suspend_and_resume(self, run, server):
        """
        The commands suspend in the mode asked for, PERSIST by default, and resume.
        """
        assert "suspended; 3 MiB of device memory in use\n" == run("suspend").stdout
        assert 0 == run("suspend", "--kv-mode", "recompute").exit_code
        assert "resumed\n" == run("resume").stdout
        assert [1, 3, None] == server.seen.suspensions


class TestDrainCommand:
    def test_drain_says_what_was_handed_over(self, run, server):
        """
        The command sends the grace asked for, or none, and prints how many requests had not ended.
        """
        said = (
            "drained; 1 handed over. A server of tandem up ends by itself now; stop a scheduler that "
            "was started alone.\n"
        )
        assert [said, said] == [run("drain").stdout, run("drain", "--grace-s", "2.5").stdout]
        assert [None, 2.5] == server.seen.drain_grace_s
