"""The view model that screens and pages draw."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tandem.admin.v1 import executors_pb2, requests_pb2
from tandem_client import NO_RETRY, AdminClient, AsyncAdminClient
from tandem_client.admin.activity import Fault, FaultKind, StepSample
from tandem_client.admin.executors import executors_from_proto
from tandem_client.admin.requests import list_from_proto
from tandem_client.views.history import SnapshotHistory
from tandem_client.views.model import as_plain, steps_per_s, view_of
from tandem_client.views.snapshot import MANY_REQUESTS, take_snapshot, take_snapshot_async
from tests.clients.python.fake_admin import EXECUTORS
from tests.clients.python.views.shapes import activity, snapshot
from tests.stats import changed


def summary(address: str, steps: int):
    proto = executors_pb2.ExecutorSummary(address=address, steps=steps)
    (one,) = executors_from_proto(executors_pb2.ListExecutorsResponse(executors=[proto]))
    return one


class TestSnapshot:
    def test_snapshot_has_all_that_the_server_tells(self, server):
        """
        One snapshot asks for statistics, executors, requests and activity.
        """
        server.seen.executors = list(EXECUTORS)
        with AdminClient(server.address, retry=NO_RETRY) as admin:
            seen = take_snapshot(admin)
        assert (2, ["box:1", "box:2"], 7, [7, 8]) == (
            seen.stats.running_requests,
            [one.address for one in seen.executors],
            seen.requests.total,
            [one.number for one in seen.activity.steps],
        )
        assert {"time_to_first_token": (1, 1, 0)} == {
            name: one.counts for name, one in seen.activity.histograms.items()
        }

    async def test_both_clients_see_the_same(self, server):
        """
        A snapshot through asyncio differs from one through threads in the server's age alone.
        """
        server.seen.executors = list(EXECUTORS)
        with AdminClient(server.address, retry=NO_RETRY) as admin:
            first = take_snapshot(admin)
        server.seen.num_polls = 0
        async with AsyncAdminClient(server.address, retry=NO_RETRY) as admin:
            assert first == await take_snapshot_async(admin)

    def test_older_server_has_less(self, server):
        """
        A server without the newer calls is polled all the same, and the view says so.
        """
        server.seen.executors, server.seen.tells_activity = None, False
        with AdminClient(server.address, retry=NO_RETRY) as admin:
            seen = take_snapshot(admin)
        assert ((), None) == (seen.executors, seen.activity)
        view = view_of(SnapshotHistory(seen))
        assert ((), (), False) == (view.steps, view.faults, view.tells_activity)

    def test_many_requests_are_not_listed(self, server, monkeypatch):
        """
        With very many requests the list is not asked for, and their number is that of the statistics.
        """
        monkeypatch.setattr("tandem_client.views.snapshot.MANY_REQUESTS", 1)
        with AdminClient(server.address, retry=NO_RETRY) as admin:
            seen = take_snapshot(admin)
        assert (None, []) == (seen.requests, server.seen.listed)
        assert (2, ()) == (
            view_of(SnapshotHistory(seen)).num_requests,
            view_of(SnapshotHistory(seen)).requests,
        )
        assert MANY_REQUESTS > 1000


class TestView:
    @pytest.mark.parametrize(
        ("changes", "state", "words"),
        [
            ({"executor_attached": True}, "serving", ""),
            ({}, "not serving", "executor is missing"),
            ({"suspended": True, "executor_attached": True}, "suspended", "an operator"),
            ({"draining": True}, "draining", "it was drained"),
        ],
    )
    def test_state_has_its_reason(self, changes, state, words):
        """
        A server that does not serve is named with the reason.
        """
        view = view_of(SnapshotHistory(snapshot(1.0, **changes)))
        assert state == view.state
        assert words in view.why
        assert bool(words) == bool(view.why)

    def test_running_requests_come_first(self):
        """
        Requests that wait stand below those that run; each keeps its place among its own.
        """
        states = (1, 3, 2, 1, 5)
        listed = list_from_proto(
            requests_pb2.ListRequestsResponse(
                requests=[
                    requests_pb2.RequestSummary(request_id=str(at), state=state)
                    for at, state in enumerate(states)
                ],
                total=9,
            )
        )
        view = view_of(SnapshotHistory(replace(snapshot(1.0), requests=listed)))
        assert (["1", "2", "4", "0", "3"], 9) == (
            [one.request_id for one in view.requests],
            view.num_requests,
        )

    def test_steps_and_faults_are_told_in_words(self):
        """
        Steps have milliseconds; the newest fault comes first, with its age and cause in one line.
        """
        step = StepSample(
            number=3, executor="a", at_s=1.0, total_s=1.0, compute_s=0.25, tokens=5, requests=2,
            is_graph=False,
        )  # fmt: skip
        faults = (
            Fault(kind=FaultKind.FRONTEND_GONE, at_s=1.0, where="0", reason="", message="", count=1),
            Fault(
                kind=FaultKind.EXECUTOR_LOST, at_s=4.0, where="a", reason="silent",
                message="no word\nfor 9 s", count=2,
            ),
        )  # fmt: skip
        seen = activity(10.0, steps=(step,), faults=faults)
        view = view_of(SnapshotHistory(replace(snapshot(10.0), activity=seen)))
        assert [(3, 250.0, 5, 2)] == [
            (one.number, one.compute_ms, one.tokens, one.requests) for one in view.steps
        ]
        assert [
            ("executor lost", "a", "silent: no word for 9 s", 6.0, 2),
            ("frontend process ended", "0", "", 9.0, 1),
        ] == [(one.what, one.where, one.why, one.age_s, one.count) for one in view.faults]

    def test_steps_per_second_are_those_of_the_window(self):
        """
        Steps per second are of each executor by itself; none of one that is new, or began anew.
        """
        before = [summary("a", 100), summary("b", 50), summary("c", 9)]
        now = [summary("a", 130), summary("b", 50), summary("c", 2), summary("d", 7)]
        assert {"a": 15.0, "b": 0.0} == steps_per_s(now, before, 2.0)
        assert {} == steps_per_s(now, (), 0.0)

    def test_view_is_json(self, server):
        """
        A view has every field of the statistics with numbers as numbers, and names in place of enums.
        """
        server.seen.executors = list(EXECUTORS)
        with AdminClient(server.address, retry=NO_RETRY) as admin:
            history = SnapshotHistory(take_snapshot(admin))
            history.add(take_snapshot(admin))
        plain = json.loads(json.dumps(as_plain(view_of(history))))
        assert {field.name for field in changed(history.now).DESCRIPTOR.fields} == set(
            plain["stats"]
        )
        assert ("SERVING", 0.0, "DECODE", 6) == (
            plain["executors"][0]["state"],
            plain["executors"][0]["steps_per_s"],
            plain["requests"][0]["state"],
            plain["stats"]["refused_by_limit"]["max_num_seqs"],
        )
        assert [100.0] == [one["ttft_p50_ms"] for one in plain["points"]]
