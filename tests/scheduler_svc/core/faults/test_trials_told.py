"""Warnings, events and counters about executors that die, suspects and poison."""

from __future__ import annotations

from scheduler_svc.core.observe.request_events import EventKind
from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.request.request import FinishReason
from tests.scheduler_svc.core.harness import Rig, small_config


def rig_with(count: int) -> Rig:
    """Return a rig with `count` requests that all run at once; it keeps events."""
    options = CoreOptions(schedule_conservativeness=0.0, track_request_events=True)
    config = small_config(max_num_blocks=128, max_batch_size=16, max_total_tokens=64)
    rig = Rig(config, options=options)
    for _ in range(count):
        rig.submit(prompt_len=6, max_tokens=24)
    return rig


class TestTold:
    def lines(self, rig: Rig) -> list[str]:
        return [line.text for line in rig.log_lines if line.is_warning]

    def test_the_log_tells_the_story(self):
        """
        Deaths, trials, passed trials and failures are each a warning that names requests.
        """
        rig = rig_with(2)
        rig.deaths.kills_at = {1: 3}
        rig.run()
        suspected = (
            " 2 requests were in more than one such step without getting on in between: tried in "
            "parts while all others wait."
        )
        suspect = suspected.replace("2 requests were", "1 request was")
        assert [
            "Executor died in a step of 2 requests (r0, r1).",
            "Executor died in a step of 2 requests (r0, r1)." + suspected,
            "Trial: of 2 suspects only 1 request (r0) may run.",
            "Trial passed by 1 request (r0); suspects left: 1.",
            "Trial: of 1 suspects only 1 request (r1) may run.",
            "Executor died in a step of 1 request (r1)." + suspect,
            "Trial of the executor: only 1 request (r0) may run, which is not suspected.",
            "Trial passed by 1 request (r0); suspects left: 1.",
            "Trial: of 1 suspects only 1 request (r1) may run.",
            "Executor died in a step of 1 request (r1)." + suspect,
            "Request r1 fails as POISON_REQUEST: executors died twice with it alone.",
        ] == self.lines(rig)

    def test_the_events_of_a_request_tell_its_story(self):
        """
        A request's events say when it was suspected, tried and cleared.
        """
        rig = rig_with(2)
        rig.deaths.kills_at = {1: 3}
        rig.run()
        told = [
            (event.kind, event.detail)
            for event in rig.core.request_events("r0")
            if event.kind in {EventKind.SUSPECTED, EventKind.TRIAL, EventKind.CLEARED}
        ]
        assert [
            (EventKind.SUSPECTED, "executor died: 1 times, now in a step of 2"),
            (EventKind.SUSPECTED, "executor died: 2 times, now in a step of 2"),
            (EventKind.TRIAL, "1 of 2 suspects"),
            (EventKind.CLEARED, ""),
            (EventKind.TRIAL, "control: does the executor live with it alone?"),
            (EventKind.CLEARED, ""),
        ] == told
        last = rig.core.request_events("r1")[-1]
        assert (EventKind.FAIL, "POISON_REQUEST") == (last.kind, last.detail)

    def test_counters_tell_how_many(self):
        """
        Stats count deaths, poison and present suspects.
        """
        rig = rig_with(2)
        rig.deaths.kills_at = {1: 3}
        most = 0
        while rig.core.has_pending_work():
            rig.step()
            most = max(most, rig.core.stats().suspected_requests)
        stats = rig.core.stats()
        assert (4, 2, 0, 1) == (
            stats.executor_deaths,
            most,
            stats.suspected_requests,
            stats.poison_requests,
        )

    def test_suspects_need_not_be_of_the_step_that_died(self):
        """
        All suspects are counted, also those of other steps than the one that has just died.
        """
        rig = rig_with(2)
        for _ in range(4):
            rig.plan()
            rig.lose_executor(died_in=0)
        last = [line for line in self.lines(rig) if line.startswith("Executor died")][-1]
        assert last.startswith("Executor died in a step of 1 request (r1). 2 requests were in")

    def test_a_step_without_requests_names_nobody(self):
        """
        An executor death is logged without names when all requests of its step have ended.
        """
        rig = rig_with(1)
        rig.plan()
        rig.core.end_handle(0, FinishReason.CANCELLED, rig.now)
        rig.lose_executor(died_in=0)
        assert ["Executor died in a step of no live request."] == self.lines(rig)

    def test_many_requests_are_named_in_part(self):
        """
        A line names eight requests at most.
        """
        rig = rig_with(10)
        rig.plan()
        rig.lose_executor(died_in=0)
        names = ", ".join(f"r{number}" for number in range(8))
        assert [f"Executor died in a step of 10 requests ({names}, ...)."] == self.lines(rig)
        rig.run()
