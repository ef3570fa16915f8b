"""The scheduler's end of the step link, rule by rule."""

from __future__ import annotations

import pytest

from tandem.errors import InternalError, SessionLost
from tandem.link.batch import Batch
from tandem.link.codec.wire import decode_request
from tandem.link.commands import KvMode, Resume, Suspend
from tandem.link.results import StepFailed
from tandem.link.scheduler_end import LinkState, SchedulerEnd
from tandem.link.session import Attach, Attached, Heartbeat
from tests.link.values import result


def attached(received: int = 0, completed: int = 0, boot_id: str = "boot") -> Attached:
    return Attached(
        boot_id=boot_id, last_received_step_id=received, last_completed_step_id=completed
    )


def failed(step_id: int) -> StepFailed:
    return StepFailed(boot_id="boot", step_id=step_id, reason="INTERNAL", message="broken")


@pytest.fixture
def end():
    """Return an end with credit for three steps, attached to session 5 of a boot."""
    end = SchedulerEnd()
    end.open("boot", 5, 3)
    end.attach()
    end.on_attached(attached())
    return end


class TestSession:
    def test_new_end_is_closed(self):
        """
        An end without a session can neither send nor attach.
        """
        end = SchedulerEnd()
        assert LinkState.CLOSED is end.state
        assert not end.can_send
        with pytest.raises(SessionLost, match="none was opened"):
            end.attach()

    def test_open_starts_step_ids_at_one(self, end):
        """
        Steps of every session count from 1, with attach ids beginning anew.
        """
        end.send(Batch(), 0)
        end.open("boot", 6, 3)
        assert Attach(boot_id="boot", session_epoch=6, attach_id=1, acked_step_id=0) == end.attach()
        end.on_attached(attached())
        assert 1 == end.send(Batch(), 0)[0]

    def test_epoch_that_does_not_grow_is_refused(self, end):
        """
        Within one boot a session with an epoch seen before is lost at once.
        """
        with pytest.raises(SessionLost, match="granted session 5 after 5"):
            end.open("boot", 5, 3)

    def test_new_boot_may_start_epochs_anew(self, end):
        """
        Another boot issues epochs of its own.
        """
        end.open("reboot", 1, 3)
        assert LinkState.DETACHED is end.state

    def test_lost_session_keeps_nothing(self, end):
        """
        A lost session has no step in flight, keeps the reason, and is left only by a new session.
        """
        end.send(Batch(), 0)
        end.lose("the executor went away")
        assert (LinkState.LOST, 0) == (end.state, end.num_inflight)
        with pytest.raises(SessionLost, match="the executor went away"):
            end.attach()
        end.open("boot", 6, 3)
        assert "" == end.lost_because

    def test_first_reason_of_a_loss_stays(self, end):
        """
        A second loss does not hide why the session was lost.
        """
        end.lose("first")
        end.lose("second")
        assert "first" == end.lost_because


class TestSend:
    def test_step_carries_its_place(self, end):
        """
        A step names its session, its id, the last result applied and the hash after it.
        """
        end.send(Batch(), 7)
        end.on_result(result(1))
        step = decode_request(end.send(Suspend(kv_mode=KvMode.OFFLOAD), 2**64 - 1)[1])
        assert (5, 2, 1) == (step.session_epoch, step.step_id, step.acked_step_id)
        assert (2**64 - 1, Suspend(kv_mode=KvMode.OFFLOAD)) == (step.state_hash, step.command)

    def test_credit_bounds_steps_in_flight(self, end):
        """
        At most max_inflight_steps steps are sent before a result of them is applied.
        """
        for _ in range(3):
            end.send(Batch(), 0)
        assert not end.can_send
        with pytest.raises(InternalError, match="3 steps in flight"):
            end.send(Batch(), 0)
        end.on_result(result(1))
        assert 4 == end.send(Batch(), 0)[0]

    def test_detached_end_sends_nothing(self, end):
        """
        An end without an attached stream sends no new step.
        """
        end.detach()
        assert not end.can_send
        end.attach()
        assert not end.can_send


class TestAttach:
    def test_attach_id_grows_with_every_stream(self, end):
        """
        Each stream of a session has a higher attach_id than the one before.
        """
        first = end.attach()
        end.detach()
        assert first.attach_id + 1 == end.attach().attach_id

    def test_attach_says_what_was_applied(self, end):
        """
        Attach acknowledges the results applied so far.
        """
        end.send(Batch(), 0)
        end.send(Resume(), 0)
        end.on_result(result(1))
        assert 1 == end.attach().acked_step_id

    def test_missing_steps_go_out_again_byte_for_byte(self, end):
        """
        Steps that the executor has not received are sent again after an attach, as the same bytes,
        in order.
        """
        sent = [end.send(Batch(), 0)[1]]
        end.on_result(result(1))
        sent += [end.send(Batch(), i)[1] for i in range(3)]
        end.detach()
        end.attach()
        assert sent[2:] == end.on_attached(attached(received=2, completed=2))

    def test_applied_steps_are_not_kept(self, end):
        """
        A step's bytes are forgotten when its result is applied.
        """
        end.send(Batch(), 0)
        end.on_result(result(1))
        end.attach()
        assert [] == end.on_attached(attached(received=1, completed=1))

    @pytest.mark.parametrize(
        ("received", "completed"),
        [(0, 0), (3, 0), (4, 3), (2, 3)],
        ids=["forgot all", "forgot results", "knows unsent steps", "completed unreceived"],
    )
    def test_executor_that_knows_other_steps_is_lost(self, end, received, completed):
        """
        An answer ends the session unless applied <= completed <= received <= sent.
        """
        for _ in range(3):
            end.send(Batch(), 0)
        end.on_result(result(1))
        end.attach()
        with pytest.raises(SessionLost, match="must not decrease"):
            end.on_attached(attached(received, completed))
        assert LinkState.LOST is end.state

    def test_other_boot_is_lost(self, end):
        """
        An answer from another boot ends the session, since the KV cache is gone.
        """
        end.attach()
        with pytest.raises(SessionLost, match="'reboot' answered for boot 'boot'"):
            end.on_attached(attached(boot_id="reboot"))

    def test_duplicate_answer_is_ignored(self, end):
        """
        A repeated Attached sends nothing again and changes nothing.
        """
        end.send(Batch(), 0)
        assert [] == end.on_attached(attached())
        assert LinkState.ATTACHED is end.state


class TestResults:
    def test_results_are_let_through_once_and_in_order(self, end):
        """
        Each result is applied exactly once, however often it comes.
        """
        end.send(Batch(), 0)
        end.send(Batch(), 0)
        taken = [end.on_result(result(step_id)) for step_id in (1, 1, 2, 1, 2)]
        assert [True, False, True, False, False] == taken
        assert (0, 2) == (end.num_inflight, end.last_applied_step_id)

    def test_missing_result_is_lost(self, end):
        """
        A result that comes before the next one due ends the session, since that one is missing.
        """
        end.send(Batch(), 0)
        end.send(Batch(), 0)
        with pytest.raises(SessionLost, match="the result of step 1 is missing"):
            end.on_result(result(2))

    def test_result_of_unsent_step_is_lost(self, end):
        """
        A result for a step that was never sent ends the session.
        """
        with pytest.raises(SessionLost, match="only 0 were sent"):
            end.on_result(result(1))

    def test_result_of_other_boot_is_lost(self, end):
        """
        A result that names another boot ends the session.
        """
        end.send(Batch(), 0)
        with pytest.raises(SessionLost, match="boot 'reboot' sent a result"):
            end.on_result(result(1, "reboot"))

    def test_detached_end_leaves_results_for_the_replay(self, end):
        """
        A result that comes while detached is not applied; it comes again after the next attach.
        """
        end.send(Batch(), 0)
        end.detach()
        assert not end.on_result(result(1))
        end.attach()
        end.on_attached(attached(received=1, completed=1))
        assert end.on_result(result(1))

    def test_failed_step_ends_the_session(self, end):
        """
        A StepFailed is let through in its turn and ends the session.
        """
        end.send(Batch(), 0)
        end.send(Batch(), 0)
        assert end.on_result(result(1))
        assert end.on_result(failed(2))
        assert LinkState.LOST is end.state
        assert "step 2 failed: INTERNAL: broken" == end.lost_because


class TestHeartbeat:
    def test_heartbeat_of_a_step_that_was_sent_changes_nothing(self, end):
        """
        A heartbeat of a step that was sent is accepted whether the step runs or is done.
        """
        end.send(Batch(), 0)
        for running, completed in ((1, 0), (0, 1), (0, 0)):
            end.on_heartbeat(
                Heartbeat(running_step_id=running, elapsed_ms=12, last_completed_step_id=completed)
            )
        assert (LinkState.ATTACHED, 1) == (end.state, end.num_inflight)

    def test_heartbeat_without_a_stream_is_left_alone(self, end):
        """
        A heartbeat that comes while no stream is attached is ignored.
        """
        end.detach()
        end.on_heartbeat(Heartbeat(running_step_id=9, elapsed_ms=0, last_completed_step_id=8))
        assert LinkState.DETACHED is end.state

    def test_heartbeat_of_unsent_step_is_lost(self, end):
        """
        A heartbeat that speaks of a step never sent ends the session.
        """
        with pytest.raises(SessionLost, match="speaks of step 1"):
            end.on_heartbeat(Heartbeat(running_step_id=1, elapsed_ms=0, last_completed_step_id=0))
