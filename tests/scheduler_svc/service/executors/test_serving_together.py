"""Executors that serve one scheduler's requests together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.errors import OutOfMemory
from tandem.link.commands import KvMode, Resume, Suspend
from tests.scheduler_svc.service.executors.fleet import (
    assert_all_right,
    end_process,
    hold,
    member,
    running,
    start_on_all,
    submit,
)
from tests.scheduler_svc.service.fakes.arithmetic_runner import GEOMETRY, expected_outputs
from tests.scheduler_svc.service.three_requests import stats_of


class TestServing:
    """Executors that are attached share the requests."""

    def test_requests_run_on_every_executor(self, make_fleet):
        """No executor idles while another has several requests; each request has its tokens."""
        bench = make_fleet(3)
        frontend = bench.frontend()
        start_on_all(bench, frontend, 6)
        hold(bench, is_holding=False)
        assert_all_right(bench, frontend, 6)
        assert stats_of(bench, frontend).executor_sessions == 3

    def test_first_executor_to_come_serves_alone_until_others_come(self, make_fleet):
        """An executor that is missing holds up no request; it joins whenever it comes."""
        bench = make_fleet(is_up=False)
        bench.links["two:1"].boot("boot-b", address="two:1")
        frontend = bench.frontend()
        bench.until(lambda: frontend.availabilities[-1].ready or True)
        submit(frontend, 2)
        assert_all_right(bench, frontend, 2)
        bench.link.boot("boot-a", address="one:1")
        bench.until(lambda: member(bench, "one:1").session.is_attached)
        start_on_all(bench, frontend, 4, first=2)
        hold(bench, is_holding=False)
        assert_all_right(bench, frontend, 6)

    def test_more_requests_run_than_one_executor_has_slots_for(self, make_fleet):
        """Two executors of 8 slots run more than 8 requests at a time."""
        bench = make_fleet()
        frontend = bench.frontend()
        submit(frontend, 16, num_tokens=20)
        bench.until(lambda: sum(running(bench)) > 8, turn_s=0.01)
        assert_all_right(bench, frontend, 16, 20)


class TestLoss:
    """A lost executor's requests go on at the others."""

    @pytest.mark.parametrize("lost", ["one:1", "two:1"])
    def test_requests_of_a_lost_executor_run_on_elsewhere_at_once(self, make_fleet, lost):
        """No time has to pass, and none of the tokens is missing or comes twice."""
        bench = make_fleet()
        frontend = bench.frontend()
        start_on_all(bench, frontend)
        link = bench.links[lost]
        end_process(link)
        hold(bench, is_holding=False)
        assert_all_right(bench, frontend, 4)
        assert frontend.availabilities[-1].ready
        assert frontend.availabilities[-1].executor_attached

    def test_silent_executor_is_left_after_move_after_s(self, make_fleet):
        """
        Its requests move where another serves; without one they would wait for `lost_after_s`.
        """
        bench = make_fleet(move_after_s=2.0, lost_after_s=600.0)
        frontend = bench.frontend()
        start_on_all(bench, frontend)
        bench.link.is_stopped = True
        other = bench.links["two:1"]
        other.is_holding = False
        other.compute()
        for _ in range(16):
            other.beat()
            bench.let_pass(0.5)
        assert_all_right(bench, frontend, 4)

    def test_late_results_of_a_silent_executor_are_dropped(self, make_fleet):
        """An executor that goes on after its requests moved adds no token to them."""
        bench = make_fleet(move_after_s=2.0, lost_after_s=600.0)
        frontend = bench.frontend()
        start_on_all(bench, frontend)
        bench.link.is_stopped = True
        other = bench.links["two:1"]
        for _ in range(8):
            other.beat()
            bench.let_pass(0.5)
        assert stats_of(bench, frontend).executor_losses == 1
        bench.link.is_holding = False
        bench.link.go_on()
        hold(bench, is_holding=False)
        assert_all_right(bench, frontend, 4)

    def test_only_executor_left_may_be_silent_for_longer(self, make_fleet):
        """With no other attached, silence shorter than `lost_after_s` loses nothing."""
        bench = make_fleet(move_after_s=2.0, lost_after_s=30.0)
        frontend = bench.frontend()
        bench.links["two:1"].kill()
        bench.until(lambda: member(bench, "one:1").session.is_attached)
        hold(bench)
        submit(frontend, 2)
        bench.until(lambda: running(bench)[0], turn_s=0.01)
        bench.link.is_stopped = True
        bench.let_pass(10.0)
        bench.link.is_holding = False
        bench.link.go_on()
        bench.until(lambda: member(bench, "one:1").session.is_attached)
        assert_all_right(bench, frontend, 2)
        assert stats_of(bench, frontend).recomputed_tokens == 0

    def test_executor_whose_stream_breaks_is_no_other_one(self, make_fleet):
        """An executor alone that was silent, and whose stream then breaks, keeps its session."""
        bench = make_fleet(1, move_after_s=2.0, lost_after_s=600.0)
        frontend = bench.frontend()
        start_on_all(bench, frontend)
        bench.link.is_stopped = True
        bench.let_pass(4.0)
        bench.link.cut()
        bench.turn()
        bench.link.is_holding = False
        bench.link.go_on()
        assert_all_right(bench, frontend, 4)
        assert stats_of(bench, frontend).executor_losses == 0

    def test_last_executor_lost_is_waited_for(self, make_fleet):
        """Requests wait when no executor is left, and go on with the first that comes back."""
        bench = make_fleet()
        frontend = bench.frontend()
        start_on_all(bench, frontend)
        for link in bench.links.values():
            end_process(link)
        bench.until(lambda: not frontend.availabilities[-1].executor_attached)
        hold(bench, is_holding=False)
        bench.links["two:1"].boot("boot-9", address="two:1")
        assert_all_right(bench, frontend, 4)

    def test_requests_fail_when_all_are_away_for_too_long(self, make_fleet):
        """`recovery_timeout_s` starts when no executor is left."""
        bench = make_fleet(recovery_timeout_s=60.0)
        frontend = bench.frontend()
        start_on_all(bench, frontend)
        for link in bench.links.values():
            end_process(link)
            bench.let_pass(50.0)
        assert {} == frontend.failed
        bench.let_pass(20.0)
        assert {"EXECUTOR_LOST"} == {one.reason for one in frontend.failed.values()}


class TestJoining:
    """Executors that join must compute what the others do."""

    @pytest.mark.parametrize(
        "change",
        [
            {"fingerprint": "0" * 64},
            {"geometry": replace(GEOMETRY, block_size=8)},
        ],
        ids=["other model", "other blocks"],
    )
    def test_joiner_that_does_not_fit_is_refused_alone(self, make_fleet, change):
        """The others go on, and no request fails; operators are told why it is not used."""
        bench = make_fleet(is_up=False)
        bench.link.boot("boot-a", address="one:1")
        frontend = bench.frontend()
        hold(bench)
        submit(frontend, 2)
        bench.until(lambda: running(bench)[0] == 2, turn_s=0.01)
        bench.links["two:1"].boot("boot-b", address="two:1", **change)
        bench.turn()
        assert not member(bench, "two:1").is_serving
        hold(bench, is_holding=False)
        assert_all_right(bench, frontend, 2)
        assert frontend.availabilities[-1].ready

    def test_links_are_told_what_joiners_must_be(self, make_fleet):
        """Once one serves, the other links accept its model, numbers and blocks only."""
        bench = make_fleet(is_up=False)
        bench.link.boot("boot-a", address="one:1")
        bench.frontend()
        bench.until(lambda: bench.links["two:1"].required is not None)
        needed = bench.links["two:1"].required
        assert ("f" * 64, "float32", 4) == (needed.fingerprint, needed.dtype, needed.block_size)
        assert bench.link.required is None  # it alone may come back with another model

    def test_smaller_executor_serves_what_fits(self, make_fleet):
        """A request that only the larger one can hold runs there; shorter ones run on both."""
        bench = make_fleet(is_up=False)
        small = replace(GEOMETRY, num_blocks=8, max_model_len=32)
        bench.link.boot("boot-a", address="one:1", geometry=small)
        bench.links["two:1"].boot("boot-b", address="two:1")
        frontend = bench.frontend()
        bench.until(lambda: all(one.session.is_attached for one in bench.loop._members))
        submit(frontend, 3, num_tokens=50)
        assert_all_right(bench, frontend, 3, 50)
        submit(frontend, 6, num_tokens=10, first=3)
        bench.until(lambda: len(frontend.ended) == 9)
        assert {} == frontend.failed

    def test_executor_away_for_long_is_parted_with(self, make_fleet):
        """
        Requests that only an absent executor can hold fail after `recovery_timeout_s`; it serves
        again whenever it comes back.
        """
        bench = make_fleet(is_up=False, recovery_timeout_s=60.0)
        small = replace(GEOMETRY, num_blocks=8)
        bench.link.boot("boot-a", address="one:1")
        bench.links["two:1"].boot("boot-b", address="two:1", geometry=small)
        frontend = bench.frontend()
        bench.until(lambda: all(one.session.is_attached for one in bench.loop._members))
        hold(bench)
        submit(frontend, 1, num_tokens=50)
        bench.until(lambda: running(bench)[0] == 1, turn_s=0.01)
        end_process(bench.link)
        hold(bench, is_holding=False)
        for _ in range(140):
            bench.links["two:1"].beat()
            bench.let_pass(0.5)
        assert [0] == list(frontend.failed)
        submit(frontend, 1, num_tokens=10, first=1)
        bench.until(lambda: 1 in frontend.ended)
        bench.link.boot("boot-c", address="one:1")
        bench.until(lambda: member(bench, "one:1").session.is_attached)
        submit(frontend, 1, num_tokens=50, first=2)
        bench.until(lambda: 2 in frontend.ended)
        assert expected_outputs([5, 6, 9], 50) == frontend.tokens[2]


class TestOtherModel:
    """Executors of another model, or with other blocks, take over once none of the old serves."""

    def test_other_executor_than_before_comes_first_with_other_blocks(self, make_fleet):
        """The service goes on, and the one that was there before joins it with these blocks."""
        bench = make_fleet(is_up=False)
        bench.link.boot("boot-a", address="one:1")
        frontend = bench.frontend()
        submit(frontend, 1)
        assert_all_right(bench, frontend, 1)
        end_process(bench.link)
        bench.turn()
        other = {"fingerprint": "0" * 64, "geometry": replace(GEOMETRY, block_size=8)}
        bench.links["two:1"].boot("boot-b", address="two:1", **other)
        bench.until(lambda: member(bench, "two:1").is_serving)
        submit(frontend, 1, first=1)
        bench.until(lambda: 1 in frontend.ended)
        assert expected_outputs([5, 6, 8], 40) == frontend.tokens[1]
        bench.link.boot("boot-c", address="one:1", **other)
        bench.until(lambda: member(bench, "one:1").is_serving)
        start_on_all(bench, frontend, first=2)
        hold(bench, is_holding=False)
        assert_all_right(bench, frontend, 6)

    def test_all_executors_change_their_model_one_after_the_other(self, make_fleet):
        """
        New ones are refused while an old one serves; requests of the old model fail by that name
        only once none is left.
        """
        bench = make_fleet()
        frontend = bench.frontend()
        start_on_all(bench, frontend)
        new = {"fingerprint": "0" * 64}
        end_process(bench.link)
        bench.turn()
        bench.link.boot("boot-8", address="one:1", **new)
        bench.turn()
        assert not member(bench, "one:1").is_serving
        hold(bench, is_holding=False)
        assert_all_right(bench, frontend, 4)
        end_process(bench.links["two:1"])
        bench.turn()
        bench.link.boot("boot-9", address="one:1", **new)
        bench.links["two:1"].boot("boot-10", address="two:1", **new)
        bench.until(lambda: all(one.session.is_attached for one in bench.loop._members))
        submit(frontend, 4, first=4)
        assert_all_right(bench, frontend, 8)


class TestOperators:
    """Operators ask of every executor what they ask of the service."""

    def test_suspension_holds_all_until_resumed(self, make_fleet):
        """Every executor gives its memory back; requests go on after the resumption."""
        bench = make_fleet()
        frontend = bench.frontend()
        start_on_all(bench, frontend)
        query = frontend.ask("suspend", b'{"kv_mode":1}')
        bench.turn()
        hold(bench, is_holding=False)
        bench.until(lambda: query in frontend.replies)
        bench.until(lambda: frontend.availabilities[-1].blocked_by)
        for link in bench.links.values():
            assert len(link.runner.commands) == 1
        bench.reply(frontend, "resume")
        assert_all_right(bench, frontend, 4)

    def test_suspension_that_one_cannot_obey_is_given_up_for_all(self, make_fleet):
        """The others are resumed, requests go on, and the operator learns which one could not."""
        bench = make_fleet()
        frontend = bench.frontend()
        start_on_all(bench, frontend)
        one, two = bench.links["one:1"], bench.links["two:1"]
        two.runner.refuses_to_suspend = OutOfMemory("full")
        query = frontend.ask("suspend", b'{"kv_mode":2}')
        bench.turn()
        hold(bench, is_holding=False)
        bench.until(lambda: query in frontend.replies)
        error = frontend.replies[query].error
        assert ("OUT_OF_MEMORY", True) == (error.reason, "two:1" in error.message)
        assert_all_right(bench, frontend, 4)
        assert [Suspend(kv_mode=KvMode.OFFLOAD), Resume()] == one.runner.commands
        assert [] == two.runner.commands

    def test_drain_gives_every_executor_back(self, make_fleet):
        """After a drain no link is left that would hold an executor."""
        bench = make_fleet()
        bench.frontend()
        bench.loop.stop(0.0)
        bench.until(lambda: all("release" in link.commands for link in bench.links.values()))

    def test_suspension_waits_for_no_executor_that_is_away(self, make_fleet):
        """An operator is answered once those that serve have obeyed; the other obeys when back."""
        bench = make_fleet()
        frontend = bench.frontend()
        end_process(bench.links["two:1"])
        bench.turn()
        bench.reply(frontend, "suspend", b'{"kv_mode":1}')
        bench.links["two:1"].boot("boot-7", address="two:1")
        bench.until(lambda: bench.links["two:1"].runner.commands)
        bench.reply(frontend, "resume")
        start_on_all(bench, frontend)
        hold(bench, is_holding=False)
        assert_all_right(bench, frontend, 4)
