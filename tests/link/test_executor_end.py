"""The executor's end of the step link, rule by rule."""

from __future__ import annotations

import pytest

from tandem.errors import InternalError, SessionHeld, SessionLost, StreamReplaced
from tandem.link.codec.wire import encode_step
from tandem.link.executor_end import ExecutorEnd
from tandem.link.session import Attach, Attached, Heartbeat, LossCause
from tests.link.values import scheduler_id, step

LEASE_S = 10.0
A, B, HEIR = scheduler_id("a"), scheduler_id("b"), scheduler_id("a", "2")


def attach(attach_id: int = 1, acked: int = 0, epoch: int = 1, boot_id: str = "boot") -> Attach:
    return Attach(boot_id=boot_id, session_epoch=epoch, attach_id=attach_id, acked_step_id=acked)


def receive(end: ExecutorEnd, step_id: int, acked: int = 0, attach_id: int = 1, now: float = 0.0):
    value = step(step_id, acked, end.session_epoch)
    return end.receive(value, encode_step(value), attach_id, now)


def run(end: ExecutorEnd, step_id: int, *, failed: bool = False) -> bool:
    end.start(step_id, 0.0)
    return end.complete(end.session_epoch, step_id, b"result %d" % step_id, failed=failed)


@pytest.fixture
def end():
    """Return an end with credit for three steps, its first session attached by scheduler "a"."""
    end = ExecutorEnd("boot", 3)
    end.open_session(A, False, LEASE_S, 0.0)
    end.attach(attach(), 0.0)
    return end


class TestSession:
    def test_epochs_count_up(self):
        """
        Every session's epoch is the one before plus 1.
        """
        end = ExecutorEnd("boot", 1)
        assert [1, 2, 3] == [end.open_session(A, False, LEASE_S, 0.0) for _ in range(3)]

    def test_live_lease_refuses_others_and_says_who(self, end):
        """
        A live lease refuses another scheduler, naming the holder and the age of its last sign of
        life.
        """
        receive(end, 1, now=2.0)
        with pytest.raises(SessionHeld, match="scheduler a/1 holds") as error:
            end.open_session(B, False, LEASE_S, 2.0 + 9.5)
        expected = {"holder": "a", "incarnation": "1", "age_ms": "9500", "lease_left_ms": "500"}
        assert expected == error.value.metadata
        assert (1, A) == (end.session_epoch, end.holder)

    def test_refusals_say_the_same_each_time(self, end):
        """
        A refusal that is repeated says the same words, so that no caller takes it for news.
        """
        words = set()
        for now in (1.0, 2.5, 7.0):
            with pytest.raises(SessionHeld) as error:
                end.open_session(B, False, LEASE_S, now)
            words.add(error.value.message)
        assert 1 == len(words)

    def test_refusal_leaves_the_session_as_it_was(self, end):
        """
        A refused scheduler costs the holder nothing.
        """
        receive(end, 1)
        with pytest.raises(SessionHeld):
            end.open_session(B, False, LEASE_S, 1.0)
        assert receive(end, 2)

    def test_expired_lease_lets_another_in(self, end):
        """
        A lease ends lease_s after the holder's last sign of life.
        """
        assert 2 == end.open_session(B, False, LEASE_S, LEASE_S)
        assert B == end.holder

    def test_lease_length_is_the_holders(self, end):
        """
        The lease that counts is the one the holder asked for, not the newcomer's.
        """
        with pytest.raises(SessionHeld):
            end.open_session(B, False, 1.0, 5.0)

    @pytest.mark.parametrize("sign", ["open", "attach", "step", "heartbeat"])
    def test_every_sign_of_life_renews_the_lease(self, end, sign):
        """
        Opening, attaching, a step, and a heartbeat on an attached stream each renew the lease.
        """
        now = 8.0
        if sign == "open":
            end.open_session(A, False, LEASE_S, now)
        elif sign == "attach":
            end.attach(attach(2), now)
        elif sign == "step":
            receive(end, 1, now=now)
        else:
            end.heartbeat(now)
        with pytest.raises(SessionHeld):
            end.open_session(B, False, LEASE_S, now + 9.0)

    def test_heartbeat_without_a_stream_renews_nothing(self, end):
        """
        The executor's own heartbeats do not keep a lease alive when no stream is attached.
        """
        end.detach(1, 1)
        end.heartbeat(9.0)
        assert 2 == end.open_session(B, False, LEASE_S, LEASE_S)

    def test_take_over_fences_a_live_holder(self, end):
        """
        take_over opens a session at once, and the fenced scheduler's messages are refused.
        """
        assert 2 == end.open_session(B, True, LEASE_S, 1.0)
        value = step(1, epoch=1)
        with pytest.raises(SessionLost, match="session 1 is over: scheduler b/1 holds session 2"):
            end.receive(value, encode_step(value), 1, 1.0)
        with pytest.raises(SessionLost, match="session 1 is over"):
            end.attach(attach(2), 1.0)
        end.attach(attach(1, epoch=2), 1.0)
        assert receive(end, 1)

    def test_holder_may_always_open_again(self, end):
        """
        The holder itself is never refused.
        """
        assert 2 == end.open_session(A, False, LEASE_S, 0.1)

    def test_opening_forgets_steps_and_results(self, end):
        """
        A new session starts with nothing received, nothing completed and nothing attached.
        """
        receive(end, 1)
        receive(end, 2)
        run(end, 1)
        end.open_session(A, False, LEASE_S, 1.0)
        answer, replay = end.attach(attach(1, epoch=2), 1.0)
        assert (0, 0) == (answer.last_received_step_id, answer.last_completed_step_id)
        assert [] == replay

    def test_result_of_a_purged_session_goes_nowhere(self, end):
        """
        The running step of a session that ended is completed without leaving a trace.
        """
        receive(end, 1)
        end.start(1, 0.0)
        epoch = end.open_session(B, True, LEASE_S, 1.0)
        end.attach(attach(1, epoch=epoch), 1.0)
        assert not end.complete(1, 1, b"late")
        assert ([], 0) == (end.attach(attach(2, epoch=epoch), 1.0)[1], end.last_completed_step_id)

    def test_nothing_runs_before_the_first_session(self):
        """
        An end without a session accepts no stream and no step.
        """
        end = ExecutorEnd("boot", 1)
        assert not end.can_execute
        with pytest.raises(SessionLost):
            end.attach(attach(epoch=0), 0.0)


class TestAttach:
    def test_answer_says_what_is_known(self, end):
        """
        Attached names the highest step received and the highest completed.
        """
        for step_id in (1, 2, 3):
            receive(end, step_id)
        run(end, 1)
        answer, _ = end.attach(attach(2), 0.0)
        assert answer == Attached(boot_id="boot", last_received_step_id=3, last_completed_step_id=1)

    def test_results_above_acked_come_again(self, end):
        """
        Results above acked are sent again after an attach, in order, as the same bytes.
        """
        for step_id in (1, 2, 3):
            receive(end, step_id)
            run(end, step_id)
        assert [b"result 2", b"result 3"] == end.attach(attach(2, acked=1), 0.0)[1]

    def test_result_is_kept_until_acknowledged(self, end):
        """
        A result that was sent is replayed until a step or an attach acknowledges it.
        """
        receive(end, 1)
        assert run(end, 1)
        assert [b"result 1"] == end.attach(attach(2), 0.0)[1]
        assert [b"result 1"] == end.attach(attach(3), 0.0)[1]
        receive(end, 2, acked=1, attach_id=3)
        assert [] == end.attach(attach(4, acked=1), 0.0)[1]

    def test_missing_result_is_lost(self, end):
        """
        A scheduler that asks for results it acknowledged before has lost its session.
        """
        receive(end, 1)
        run(end, 1)
        receive(end, 2, acked=1)
        with pytest.raises(SessionLost, match="are gone"):
            end.attach(attach(2, acked=0), 0.0)

    def test_acknowledging_the_future_is_lost(self, end):
        """
        A scheduler cannot have applied what was not completed.
        """
        receive(end, 1)
        with pytest.raises(SessionLost, match="only 0 were completed"):
            end.attach(attach(2, acked=1), 0.0)

    def test_other_boot_is_lost(self, end):
        """
        A scheduler that believes in another boot must open a new session; this one stays.
        """
        with pytest.raises(SessionLost, match="boot 'before' is gone"):
            end.attach(attach(2, boot_id="before"), 0.0)
        assert receive(end, 1)

    @pytest.mark.parametrize("attach_id", [1, 2])
    def test_lower_attach_id_is_replaced(self, end, attach_id):
        """
        A stream must have a higher attach_id than every stream before it.
        """
        end.attach(attach(2), 0.0)
        with pytest.raises(StreamReplaced, match="was replaced by stream 2"):
            end.attach(attach(attach_id), 0.0)

    def test_older_stream_is_dead(self, end):
        """
        Steps of an older stream are refused after a higher attach_id came, and the session goes on.
        """
        end.attach(attach(2), 0.0)
        with pytest.raises(StreamReplaced):
            receive(end, 1, attach_id=1)
        assert receive(end, 1, attach_id=2)


class TestReceive:
    def test_steps_are_taken_once(self, end):
        """
        A repeated step is tolerated and not executed again, before and after it was acknowledged.
        """
        assert [True, True, False, False] == [receive(end, i) for i in (1, 2, 1, 2)]
        run(end, 1)
        receive(end, 3, acked=1)
        assert not receive(end, 1)

    def test_gap_is_lost(self, end):
        """
        A step that comes without its predecessor ends the session for good.
        """
        with pytest.raises(SessionLost, match="the ones between are missing"):
            receive(end, 2)
        with pytest.raises(SessionLost, match="the ones between are missing"):
            end.attach(attach(2), 0.0)
        assert not end.can_execute

    def test_same_id_with_other_bytes_is_lost(self, end):
        """
        The id of a step that was received never comes with other bytes.
        """
        receive(end, 1)
        other = step(1, state_hash=1)
        with pytest.raises(SessionLost, match="step 1 came again with other bytes"):
            end.receive(other, encode_step(other), 1, 0.0)

    def test_step_over_the_credit_is_lost(self, end):
        """
        A step that would exceed max_inflight_steps, counted from acked_step_id, ends the session.
        """
        for step_id in (1, 2, 3):
            receive(end, step_id)
        with pytest.raises(SessionLost, match="the credit is 3 steps"):
            receive(end, 4)

    def test_acknowledging_the_future_is_lost(self, end):
        """
        A step that acknowledges a result not yet made ends the session.
        """
        receive(end, 1)
        with pytest.raises(SessionLost, match="only 0 were completed"):
            receive(end, 2, acked=1)

    def test_resent_step_with_an_old_acknowledgement_is_taken(self, end):
        """
        A step sent again carries what was acknowledged when it was first sent, which may be less than by now.
        """
        receive(end, 1)
        run(end, 1)
        end.attach(attach(2, acked=1), 0.0)
        assert receive(end, 2, acked=0, attach_id=2)
        assert 1 == end.acked_step_id


class TestExecution:
    def test_steps_go_on_while_detached(self, end):
        """
        Received steps run without a stream; their results wait for the next attach.
        """
        receive(end, 1)
        receive(end, 2)
        end.detach(1, 1)
        assert [False, False] == [run(end, 1), run(end, 2)]
        assert [b"result 1", b"result 2"] == end.attach(attach(2), 0.0)[1]

    def test_result_goes_out_on_an_attached_stream(self, end):
        """
        A completed step's result is to be sent at once where a stream is attached.
        """
        receive(end, 1)
        assert run(end, 1)

    def test_steps_start_in_order_one_at_a_time(self, end):
        """
        Starting a step out of turn, or beside another, is a bug of the caller.
        """
        receive(end, 1)
        receive(end, 2)
        with pytest.raises(InternalError):
            end.start(2, 0.0)
        end.start(1, 0.0)
        with pytest.raises(InternalError):
            end.start(1, 0.0)

    @pytest.mark.parametrize("step_id", [1, 3, 4], ids=["twice", "early", "never received"])
    def test_steps_complete_in_order_and_once(self, end, step_id):
        """
        Completing a step twice, out of turn or unasked is a bug of the caller.
        """
        for received in (1, 2, 3):
            receive(end, received)
        run(end, 1)
        with pytest.raises(InternalError):
            end.complete(1, step_id, b"")

    def test_failed_step_is_the_last(self, end):
        """
        A failed step is the last that runs, and its outcome is replayed like a result.
        """
        receive(end, 1)
        receive(end, 2)
        assert run(end, 1, failed=True)
        assert not end.can_execute
        assert not receive(end, 3)
        answer, replay = end.attach(attach(2), 0.0)
        assert ([b"result 1"], 2) == (replay, answer.last_received_step_id)
        end.open_session(A, False, LEASE_S, 0.0)
        assert end.can_execute

    def test_lost_session_refuses_its_scheduler(self, end):
        """
        A session the executor gave up refuses every message with the reason.
        """
        end.lose("the state hash does not match")
        end.lose("something later")
        with pytest.raises(SessionLost, match="the state hash does not match"):
            receive(end, 1)


class TestHeirs:
    def test_next_incarnation_waits_for_nothing_once_the_stream_is_gone(self, end):
        """
        A restarted scheduler gets its predecessor's session at once when no stream of it is attached.
        """
        end.detach(1, 1)
        assert 2 == end.open_session(HEIR, False, LEASE_S, 0.1)
        assert HEIR == end.holder

    def test_next_incarnation_waits_while_the_stream_is_attached(self, end):
        """
        Two living schedulers of one name are two schedulers: the lease protects the holder.
        """
        with pytest.raises(SessionHeld):
            end.open_session(HEIR, False, LEASE_S, 9.9)
        assert 2 == end.open_session(HEIR, False, LEASE_S, 10.0)

    @pytest.mark.parametrize("take_over", [False, True])
    def test_replaced_incarnation_never_inherits(self, end, take_over):
        """
        A scheduler that was replaced, by an heir or by force, waits for the new holder's lease even
        when the new holder has no stream.
        """
        end.detach(1, 1)
        end.open_session(HEIR, take_over, LEASE_S, 1.0)
        with pytest.raises(SessionHeld):
            end.open_session(A, False, LEASE_S, 10.9)
        assert 3 == end.open_session(A, False, LEASE_S, 11.0)
        with pytest.raises(SessionHeld):
            end.open_session(HEIR, False, LEASE_S, 12.0)

    def test_only_the_name_inherits(self, end):
        """
        Another scheduler waits for the lease even when no stream is attached.
        """
        end.detach(1, 1)
        with pytest.raises(SessionHeld):
            end.open_session(B, False, LEASE_S, 9.0)

    def test_fenced_scheduler_is_told_by_whom(self, end):
        """
        The error that ends a fenced scheduler's stream and refuses its messages names cause and new
        holder.
        """
        end.open_session(B, True, LEASE_S, 0.0)
        expected = {"cause": "fenced", "holder": "b", "incarnation": "1"}
        assert expected == end.fenced().metadata
        with pytest.raises(SessionLost) as lost:
            end.attach(attach(2), 0.0)
        assert expected == lost.value.metadata

    @pytest.mark.parametrize("cause", list(LossCause))
    def test_cause_of_a_loss_travels_with_every_refusal(self, end, cause):
        """
        A session that the executor gave up names the cause to every scheduler that attaches.
        """
        end.lose("a test", cause)
        with pytest.raises(SessionLost) as lost:
            end.attach(attach(2), 0.0)
        assert {"cause": cause.value} == lost.value.metadata

    def test_other_boot_is_a_cause_of_its_own(self, end):
        """
        A stream for a process that is gone is refused with a cause of its own, `new_boot`.
        """
        with pytest.raises(SessionLost) as lost:
            end.attach(attach(2, boot_id="older"), 0.0)
        assert {"cause": "new_boot"} == lost.value.metadata


class TestDetach:
    def test_replaced_stream_cannot_detach_its_successor(self, end):
        """
        The end of an older stream leaves the newer one attached.
        """
        end.attach(attach(2), 0.0)
        end.detach(1, 1)
        assert 2 == end.attach_id

    def test_stream_of_an_older_session_cannot_detach_a_newer_one(self, end):
        """
        Attach ids begin anew in every session, so the session is compared too.
        """
        end.open_session(A, False, LEASE_S, 0.0)
        end.attach(attach(1, epoch=2), 0.0)
        end.detach(1, 1)
        assert 1 == end.attach_id


class TestHeartbeat:
    def test_heartbeat_names_the_running_step_and_its_age(self, end):
        """
        A heartbeat says which step computes, for how long, and what was completed last.
        """
        receive(end, 1)
        receive(end, 2)
        run(end, 1)
        end.start(2, 1.0)
        expected = Heartbeat(running_step_id=2, elapsed_ms=250, last_completed_step_id=1)
        assert expected == end.heartbeat(1.25)

    def test_idle_heartbeat_has_no_step(self, end):
        """
        An idle executor's heartbeat has running step 0 and no elapsed time.
        """
        expected = Heartbeat(running_step_id=0, elapsed_ms=0, last_completed_step_id=0)
        assert expected == end.heartbeat(99.0)
