"""The newest steps and faults that the core process keeps, and the query for them."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from scheduler_svc.core.request.events import Failed
from scheduler_svc.executor_client.session_events import SessionEnded
from scheduler_svc.ipc import activity as messages
from scheduler_svc.ipc import snapshot
from scheduler_svc.service.observe.activity import MAX_FAULTS, MAX_MESSAGE_CHARS, Activity
from tandem.admin.v1 import activity_pb2 as pb
from tandem.errors import Draining, ExecutorLost, PoisonRequest
from tandem.link.batch import NO_INT32, Batch
from tandem.link.commands import Resume
from tandem.link.results import StepResult
from tandem.link.session import LossCause

EXECUTOR = "127.0.0.1:50061"
"""Address with which the bench's executor is named."""
PROMPT = [5, 6, 7, 8, 9]
RESULT = StepResult(
    boot_id="boot",
    step_id=1,
    slot=NO_INT32,
    generation=NO_INT32.view(np.uint32),
    position=NO_INT32,
    token=NO_INT32,
)


def loss(message: str = "reset", cause: LossCause = LossCause.SILENT) -> SessionEnded:
    return SessionEnded(cause=cause, died_in=None, may_live="", message=message)


@pytest.fixture
def activity():
    """Activity of a scheduler that started at 100 s."""
    return Activity(100.0)


def faults(activity: Activity) -> list[tuple[object, ...]]:
    found = activity.snapshot({}, max_steps=0, now=200.0).faults
    return [(one.kind, one.where, one.reason, one.count, one.at_s) for one in found]


class TestFaults:
    def test_equal_faults_are_one_with_a_count(self, activity):
        """
        An executor that is lost again for the same cause takes one entry, with the newest time.
        """
        activity.note_loss("a:1", loss(), 101.0)
        activity.note_loss("a:1", loss(), 105.0)
        activity.note_loss("b:1", loss(), 106.0)
        activity.note_loss("b:1", loss(cause=LossCause.STUCK), 107.0)
        kind = pb.FAULT_KIND_EXECUTOR_LOST
        assert [
            (kind, "a:1", "silent", 2, 5.0),
            (kind, "b:1", "silent", 1, 6.0),
            (kind, "b:1", "stuck", 1, 7.0),
        ] == faults(activity)

    def test_faults_in_turns_push_no_other_out(self, activity):
        """
        Two executors that are lost in turns take two entries, however often, beside an older fault.
        """
        activity.note_bookkeeping("a block is lost", 101.0)
        for number in range(MAX_FAULTS):
            activity.note_loss(("a:1", "b:1")[number % 2], loss(), 102.0 + number)
        assert [("", 1), ("a:1", MAX_FAULTS // 2), ("b:1", MAX_FAULTS // 2)] == [
            (where, count) for _, where, _, count, _ in faults(activity)
        ]

    def test_failed_requests_are_counted_by_reason(self, activity):
        """
        Requests that fail together have one entry for each reason.
        """
        lost, poison = ExecutorLost("gone"), PoisonRequest("it kills")
        errors = enumerate((lost, poison, lost))
        activity.note_failures([Failed(handle=at, error=one) for at, one in errors], 101.0)
        kind = pb.FAULT_KIND_REQUESTS_FAILED
        assert [
            (kind, "", "EXECUTOR_LOST", 2, 1.0),
            (kind, "", "POISON_REQUEST", 1, 1.0),
        ] == faults(activity)

    def test_only_the_newest_are_kept(self, activity):
        """
        The oldest fault goes when there are more than are kept; a long message is cut.
        """
        for number in range(MAX_FAULTS + 3):
            activity.note_loss(f"box:{number}", loss("x" * 9999), 101.0)
        found = activity.snapshot({}, max_steps=0, now=200.0).faults
        assert (MAX_FAULTS, "box:3", MAX_MESSAGE_CHARS) == (
            len(found),
            found[0].where,
            len(found[0].message),
        )


class TestSteps:
    def test_steps_keep_no_columns(self, activity):
        """
        A step that is kept has the numbers of its tokens and rows, and nothing of its batch.
        """
        tokens, slots = np.full(3, 5, np.int32), np.arange(3, dtype=np.int32)
        batch = Batch(row_slot=slots, row_num_tokens=tokens)
        sum_of = batch.num_tokens
        activity.note_step(EXECUTOR, batch, RESULT, num_tokens=sum_of, total_s=0.5, now=101.0)
        columns = [weakref.ref(tokens), weakref.ref(slots)]
        del batch, tokens, slots
        assert [None, None] == [column() for column in columns]
        (step,) = activity.snapshot({}, max_steps=9, now=200.0).steps
        assert (15, 3, 0.5, 1.0) == (step.tokens, step.requests, step.total_s, step.at_s)

    def test_command_without_rows_has_no_tokens(self, activity):
        """
        A step that is no batch counts as one without tokens and requests.
        """
        activity.note_step(EXECUTOR, Resume(), RESULT, num_tokens=0, total_s=0.5, now=101.0)
        (step,) = activity.snapshot({}, max_steps=9, now=200.0).steps
        assert (0, 0) == (step.tokens, step.requests)


class TestQuery:
    def test_steps_tell_what_was_computed(self, bench):
        """
        Tokens of all steps are those of the prompt and of the output but the last one, in order of their numbers.
        """
        frontend = bench.frontend()
        frontend.submit(1, PROMPT, 6)
        bench.until(
            lambda: 1 in frontend.ended and not bench.loop._state.core.stats().steps_in_flight
        )
        answer = bench.reply(frontend, "activity", b'{"max_steps": 256}').result
        found = messages.decode_activity(answer)
        stats = snapshot.decode_stats(bench.reply(frontend, "stats").result)
        steps = found.steps
        assert stats.steps == len(steps) == steps[-1].number
        assert len(PROMPT) + 5 == sum(one.tokens for one in steps if one.requests == 1)
        assert {EXECUTOR} == {one.executor for one in steps}
        assert sorted(one.at_s for one in steps) == [one.at_s for one in steps]
        assert stats.first_tokens == found.histograms["time_to_first_token"].count

        answer = bench.reply(frontend, "activity", b'{"max_steps": 2}').result
        assert steps[-2:] == messages.decode_activity(answer).steps

    def test_lost_executor_is_a_fault(self, bench):
        """
        The end of a session is told with its cause, and so is a frontend that ends.
        """
        frontend, other = bench.frontend(0), bench.frontend(1)
        bench.link.cut(Draining("stopping"))
        bench.turn()
        bench.drop(other)
        bench.loop.frontend_died(1)
        bench.turn()
        answer = bench.reply(frontend, "activity", b'{"max_steps": 0}').result
        found = messages.decode_activity(answer)
        assert () == found.steps
        assert [
            (pb.FAULT_KIND_EXECUTOR_LOST, EXECUTOR, "draining"),
            (pb.FAULT_KIND_FRONTEND_GONE, "1", ""),
        ] == [(one.kind, one.where, one.reason) for one in found.faults]
