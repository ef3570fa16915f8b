"""Executors that join, are drained and leave while the service runs."""

from __future__ import annotations

import msgspec
import pytest

from scheduler_svc.ipc import snapshot
from tests.scheduler_svc.service.executors.fleet import (
    assert_all_right,
    end_process,
    hold,
    member,
    running,
    start_on_all,
    submit,
)
from tests.scheduler_svc.service.fakes.fake_link import FakeLink


def argument(address: str, grace_s: float = 0.0) -> bytes:
    return msgspec.json.encode(snapshot.ExecutorArgument(address=address, grace_s=grace_s))


def states(bench, frontend) -> dict[str, str]:
    """Return the state of each executor, as operators get it."""
    rows = snapshot.decode_executors(bench.reply(frontend, "executors").result).executors
    return {row.address: row.state for row in rows}


class TestDrain:
    def test_requests_that_end_in_the_grace_time_end_where_they_run(self, make_fleet):
        """No request is admitted at the executor any more, and none of its own moves."""
        bench = make_fleet()
        frontend = bench.frontend()
        start_on_all(bench, frontend)
        query = frontend.ask("drain_executor", argument("one:1", 60.0))
        bench.turn()
        assert "draining" == states(bench, frontend)["one:1"]
        submit(frontend, 2, first=4)
        hold(bench, is_holding=False)
        assert_all_right(bench, frontend, 6)
        bench.until(lambda: query in frontend.replies)
        result = snapshot.decode_executor_drain(frontend.replies[query].result)
        assert 0 == result.moved_requests
        assert {"one:1": "drained", "two:1": "serving"} == states(bench, frontend)
        assert "release" in bench.link.commands

    def test_requests_left_after_the_grace_time_move(self, make_fleet):
        """They go on elsewhere with all of their tokens, and the operator is told how many."""
        bench = make_fleet()
        frontend = bench.frontend()
        start_on_all(bench, frontend)
        num_there = running(bench)[0]
        query = frontend.ask("drain_executor", argument("one:1", 0.0))
        bench.until(lambda: query in frontend.replies)
        moved = snapshot.decode_executor_drain(frontend.replies[query].result).moved_requests
        assert num_there == moved
        hold(bench, is_holding=False)
        assert_all_right(bench, frontend, 4)

    def test_drained_executor_serves_again_once_it_is_added(self, make_fleet):
        """After an update under the same address, an operator adds it, and it serves."""
        bench = make_fleet()
        frontend = bench.frontend()
        bench.reply(frontend, "drain_executor", argument("one:1"))
        bench.links["one:1"] = FakeLink()
        bench.links["one:1"].boot("boot-7", address="one:1")
        bench.reply(frontend, "add_executor", argument("one:1"))
        bench.links["one:1"].connect()
        bench.until(lambda: states(bench, frontend)["one:1"] == "serving")
        start_on_all(bench, frontend)
        hold(bench, is_holding=False)
        assert_all_right(bench, frontend, 4)

    def test_requests_wait_when_the_only_executor_is_drained(self, make_fleet):
        """They go on, with no token lost, as soon as an executor is added."""
        bench = make_fleet(1)
        frontend = bench.frontend()
        start_on_all(bench, frontend, 2)
        bench.reply(frontend, "drain_executor", argument("one:1"))
        bench.let_pass(2.0)
        assert not frontend.availabilities[-1].ready
        assert "tandem executors add" in frontend.availabilities[-1].blocked_by
        bench.links["two:1"] = FakeLink()
        bench.links["two:1"].boot("boot-8", address="two:1")
        bench.reply(frontend, "add_executor", argument("two:1"))
        bench.links["two:1"].connect()
        assert_all_right(bench, frontend, 2)


class TestJoinAndLeave:
    def test_added_executor_serves(self, make_fleet):
        """It takes requests from the queue as soon as it is attached."""
        bench = make_fleet(1)
        frontend = bench.frontend()
        bench.links["two:1"] = FakeLink()
        bench.links["two:1"].boot("boot-2", address="two:1")
        bench.reply(frontend, "add_executor", argument("two:1"))
        bench.links["two:1"].connect()
        bench.until(lambda: member(bench, "two:1").is_serving)
        start_on_all(bench, frontend)
        hold(bench, is_holding=False)
        assert_all_right(bench, frontend, 4)

    def test_requests_of_a_removed_executor_move_at_once(self, make_fleet):
        """It is forgotten, and its requests have all of their tokens."""
        bench = make_fleet()
        frontend = bench.frontend()
        start_on_all(bench, frontend)
        bench.reply(frontend, "remove_executor", argument("one:1"))
        assert {"two:1": "serving"} == states(bench, frontend)
        hold(bench, is_holding=False)
        assert_all_right(bench, frontend, 4)

    @pytest.mark.parametrize(
        ("kind", "address", "text"),
        [
            ("add_executor", "two:1", "two:1 is named already"),
            ("add_executor", "nowhere", "must be HOST:PORT or unix:PATH"),
            ("drain_executor", "four:1", "no executor is named 'four:1'"),
            ("remove_executor", "four:1", "these are: one:1, two:1"),
        ],
    )
    def test_wrong_address_is_refused_with_the_field(self, make_fleet, kind, address, text):
        """The error says which executors there are, or what an address must be."""
        bench = make_fleet()
        frontend = bench.frontend()
        error = bench.reply(frontend, kind, argument(address)).error
        assert ("INVALID_PARAMETER", "address") == (error.reason, error.field)
        assert text in error.message


class TestNames:
    def test_executors_come_and_go_with_what_a_name_means(self, make_fleet):
        """One that is found joins; one that is found no longer leaves once it is lost."""
        bench = make_fleet(1)
        frontend = bench.frontend()
        bench.links["10.0.0.2:1"] = FakeLink()
        bench.links["10.0.0.2:1"].boot("boot-2", address="10.0.0.2:1")
        bench.loop._found({"10.0.0.2:1": "pods"})
        bench.turn()
        bench.links["10.0.0.2:1"].connect()
        bench.until(lambda: states(bench, frontend)["10.0.0.2:1"] == "serving")
        bench.loop._found({})
        start_on_all(bench, frontend)
        end_process(bench.links["10.0.0.2:1"])
        hold(bench, is_holding=False)
        assert_all_right(bench, frontend, 4)
        assert {"one:1": "serving"} == states(bench, frontend)

    def test_executor_that_an_operator_removed_stays_away(self, make_fleet):
        """It does not join again while the name still means it."""
        bench = make_fleet(1)
        frontend = bench.frontend()
        bench.links["10.0.0.2:1"] = FakeLink()
        bench.loop._found({"10.0.0.2:1": "pods"})
        bench.turn()
        bench.reply(frontend, "remove_executor", argument("10.0.0.2:1"))
        bench.loop._found({"10.0.0.2:1": "pods"})
        bench.turn()
        assert {"one:1"} == set(states(bench, frontend))
