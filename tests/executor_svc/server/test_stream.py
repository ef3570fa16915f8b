"""The step link over a real server: order, replay without recomputation, refusals, signs of life."""

from __future__ import annotations

import pytest
import torch

from executor_svc.device.choice import is_sticky
from tandem.errors import CorruptMessage, SessionLost, StreamReplaced
from tandem.link.codec.checksum import seal
from tandem.link.codec.wire import decode_request, encode_attach, encode_step
from tandem.link.commands import KvMode, Resume, Step, Suspend
from tandem.link.results import StepFailed, StepResult
from tandem.link.session import Attach, Attached, Heartbeat
from tests.executor_svc.server.harness import StepClient, Stream, wait_until


@pytest.fixture
def client(executor):
    return StepClient(executor)


def attach_bytes(client, **changes):
    fields = {
        "boot_id": client.end.boot_id,
        "session_epoch": client.end.session_epoch,
        "attach_id": 1,
        "acked_step_id": 0,
    }
    return encode_attach(Attach(**{**fields, **changes}))


def changed(raw, **changes):
    """A planned step's bytes with some fields different."""
    step = decode_request(raw)
    fields = {name: getattr(step, name) for name in Step.__dataclass_fields__}
    return encode_step(Step(**{**fields, **changes}))


class TestSteps:
    def test_results_come_in_order_with_what_the_rows_sampled(self, executor, client):
        """
        Each step is answered by one result with boot, step, slot, generation, position and token.
        """
        stream = client.attach()
        results = list(client.steps(stream, 3))
        assert [1, 2, 3] == executor.runner.executed
        assert [1, 2, 3] == [result.step_id for result in results]
        assert [4, 5, 6] == [int(result.position[0]) for result in results]
        assert {executor.server.boot_id} == {result.boot_id for result in results}
        assert all(0 <= int(result.token[0]) < 320 for result in results)

    def test_timings_cover_queueing_and_total(self, executor, client):
        """
        A step that waited behind another reports the wait, and total covers wait and work.
        """
        stream = client.attach()
        executor.runner.gate.clear()
        stream.send(client.plan())
        stream.send(client.plan())
        wait_until(lambda: executor.runner.is_waiting)
        wait_until(lambda: executor.server._link._end.last_received_step_id == 2)
        executor.runner.gate.set()
        wait_until(lambda: client.apply(stream) == 2)
        second = client.results[1].timings
        assert 0 < second.queued_ns < second.total_ns
        assert second.forward_ns + second.sample_ns <= second.total_ns

    def test_suspend_and_resume_are_steps_like_others(self, client):
        """
        Suspend and Resume answer with an empty result, and decoding goes on bit for bit.
        """
        stream = client.attach()
        client.step(stream)
        for command in (Suspend(kv_mode=KvMode.OFFLOAD), Resume()):
            stream.send(client.plan(command))
        wait_until(lambda: client.apply(stream) == 3)
        assert [0, 0] == [len(result.token) for result in client.results[1:3]]
        assert 6 == int(list(client.steps(stream, 2))[1].position[0])


class TestReplay:
    def test_result_of_a_cut_stream_comes_again_without_computing_again(self, executor, client):
        """
        A step that completes while detached is kept, and its result follows the next attach.
        """
        stream = client.attach()
        client.step(stream)
        executor.runner.gate.clear()
        stream.send(client.plan())
        wait_until(lambda: executor.runner.is_waiting)
        stream.cut()
        executor.runner.gate.set()
        wait_until(lambda: executor.runner.executed == [1, 2])
        again = client.attach()
        wait_until(lambda: client.apply(again) == 2)
        client.step(again)
        assert [1, 2, 3] == executor.runner.executed
        assert [5] == client.results[1].position.tolist()

    def test_step_that_never_arrived_is_computed_once(self, executor, client):
        """
        Attached names the last step received; the scheduler sends the ones above it again, and duplicates are ignored.
        """
        stream = client.attach()
        client.step(stream)
        stream.cut()
        lost = client.plan()
        again = client.attach()
        again.send(lost)
        again.send(lost)
        wait_until(lambda: client.apply(again) == 2)
        client.step(again)
        assert [1, 2, 3] == executor.runner.executed
        assert [
            Attached(boot_id=client.end.boot_id, last_received_step_id=1, last_completed_step_id=1)
        ] == again.of(Attached)

    def test_steps_received_go_on_while_nobody_is_attached(self, executor, client):
        """
        Queued steps run to their end without a stream.
        """
        stream = client.attach()
        executor.runner.gate.clear()
        for _ in range(3):
            stream.send(client.plan())
        wait_until(lambda: executor.runner.is_waiting)
        wait_until(lambda: executor.server._link._end.last_received_step_id == 3)
        stream.cut()
        executor.runner.gate.set()
        wait_until(lambda: executor.runner.executed == [1, 2, 3])
        again = client.attach()
        wait_until(lambda: client.apply(again) == 3)


class TestRefusals:
    def test_newer_stream_ends_the_older_one(self, client):
        """
        A higher attach_id ends the old stream with STREAM_REPLACED and goes on itself.
        """
        old = client.attach()
        new = client.attach()
        assert isinstance(old.ended_with(), StreamReplaced)
        assert 1 == client.step(new).step_id

    def test_attach_id_must_grow(self, executor, client):
        """
        A stream with an attach_id seen before is refused STREAM_REPLACED.
        """
        client.attach()
        late = Stream(executor.channel)
        late.send(attach_bytes(client, attach_id=1))
        assert isinstance(late.ended_with(), StreamReplaced)

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"boot_id": "another"}, "boot 'another' is gone"),
            ({"session_epoch": 7}, "session 7 is over"),
            ({"acked_step_id": 5}, "step 5 is acknowledged"),
        ],
        ids=["boot", "epoch", "acked"],
    )
    def test_attach_to_what_is_not_here_is_session_lost(self, executor, client, changes, why):
        """
        An unknown boot, epoch or acknowledgement is SESSION_LOST and says which.
        """
        stream = Stream(executor.channel)
        stream.send(attach_bytes(client, **changes))
        error = stream.ended_with()
        assert isinstance(error, SessionLost)
        assert why in error.message

    def test_gap_in_step_ids_is_session_lost(self, executor, client):
        """
        A step that skips one ends the session, and nothing of it runs.
        """
        stream = client.attach()
        client.plan()
        stream.send(client.plan())
        assert isinstance(stream.ended_with(), SessionLost)
        assert "missing" in stream.error.message
        assert [] == executor.runner.executed
        again = Stream(executor.channel)
        again.send(attach_bytes(client, attach_id=2))
        assert isinstance(again.ended_with(), SessionLost)

    def test_same_step_with_other_bytes_is_session_lost(self, client):
        """
        A step id that comes again must be byte for byte the same.
        """
        stream = client.attach()
        raw = client.plan()
        stream.send(raw)
        stream.send(changed(raw, state_hash=1))
        error = stream.ended_with()
        assert isinstance(error, SessionLost)
        assert "other bytes" in error.message

    def test_step_over_the_credit_is_session_lost(self, executor, client):
        """
        More than max_inflight_steps unacknowledged steps end the session.
        """
        credit = executor.describe().max_inflight_steps
        stream = client.attach()
        executor.runner.gate.clear()
        for _ in range(credit + 1):
            stream.send(client.plan())
        error = stream.ended_with()
        assert isinstance(error, SessionLost)
        assert f"credit is {credit} steps" in error.message

    @pytest.mark.parametrize("raw", [b"\xff\xff\xff", b""], ids=["garbage", "empty"])
    def test_malformed_message_is_session_lost(self, client, raw):
        """
        Bytes that are no ExecuteRequest end the stream with a typed error.
        """
        stream = client.attach()
        stream.send(seal(raw))
        assert isinstance(stream.ended_with(), SessionLost)

    def test_message_changed_on_the_way_comes_again_on_the_next_stream(self, client):
        """
        A message that does not match its checksum ends the stream and leaves the session alone.
        """
        stream = client.attach()
        raw = client.plan()
        stream.send(raw[:7] + bytes([raw[7] ^ 1]) + raw[8:])
        assert isinstance(stream.ended_with(), CorruptMessage)
        again = client.attach()
        wait_until(lambda: again.of(StepResult))
        assert [1] == [result.step_id for result in again.of(StepResult)]

    def test_first_message_must_be_attach_and_only_the_first(self, executor, client):
        """
        A step before Attach, and a second Attach, are refused.
        """
        twice = client.attach()
        raw = client.plan()
        early = Stream(executor.channel)
        early.send(raw)
        assert "before Attach" in early.ended_with().message
        twice.send(attach_bytes(client, attach_id=9))
        assert "Attach came twice" in twice.ended_with().message


class TestHeartbeat:
    @pytest.mark.slow
    def test_heartbeats_go_on_while_a_step_computes(self, executor, client):
        """
        During a step heartbeats name it and its growing age; afterwards they say idle.
        """
        stream = client.attach()
        executor.runner.gate.clear()
        stream.send(client.plan())

        def ages():
            return [beat.elapsed_ms for beat in stream.of(Heartbeat) if beat.running_step_id == 1]

        wait_until(lambda: len(ages()) >= 3)
        seen = ages()
        assert sorted(seen) == seen
        assert seen[0] < seen[-1]
        executor.runner.gate.set()
        idle = Heartbeat(running_step_id=0, elapsed_ms=0, last_completed_step_id=1)
        wait_until(lambda: idle in stream.of(Heartbeat))


class TestFailures:
    def test_other_state_hash_ends_the_session(self, executor, client):
        """
        A step with another state hash gets no result, and no later step of its session runs.
        """
        stream = client.attach()
        client.step(stream)
        executor.runner.gate.clear()
        stream.send(changed(client.plan(), state_hash=12345))
        stream.send(client.plan())
        wait_until(lambda: executor.server._link._end.last_received_step_id == 3)
        executor.runner.gate.set()
        error = stream.ended_with()
        assert isinstance(error, SessionLost)
        assert "state hash" in error.message
        again = Stream(executor.channel)
        again.send(attach_bytes(client, attach_id=2, acked_step_id=1))
        assert isinstance(again.ended_with(), SessionLost)
        fresh = StepClient(executor)
        fresh.step(fresh.attach())
        assert [1, 2, 1] == executor.runner.executed
        assert 1 == len(stream.of(StepResult))

    def test_batch_that_contradicts_the_slots_ends_the_session(self, client):
        """
        A row that starts elsewhere than its slot's planned length is SESSION_LOST, not a crash.
        """
        stream = client.attach()
        client.step(stream)
        raw = client.plan()
        step = decode_request(raw)
        shifted = type(step.command)(
            row_slot=step.command.row_slot,
            row_num_tokens=step.command.row_num_tokens,
            row_start=step.command.row_start + 3,
            row_flags=step.command.row_flags,
        )
        stream.send(changed(raw, command=shifted))
        assert isinstance(stream.ended_with(), SessionLost)

    def test_step_that_raises_fails_and_the_next_session_works(self, executor, client):
        """
        An exception becomes StepFailed with a reason, later steps of the session do not run, and a new session starts clean.
        """
        stream = client.attach()
        client.step(stream)
        executor.runner.fails_with = RuntimeError("the kernel did not like it\nframe 1")
        executor.runner.gate.clear()
        for _ in range(3):
            stream.send(client.plan())
        wait_until(lambda: executor.server._link._end.last_received_step_id == 4)
        executor.runner.gate.set()
        wait_until(lambda: bool(stream.of(StepFailed)))
        fresh = StepClient(executor)
        assert 1 == fresh.step(fresh.attach()).step_id
        assert [1, 1] == executor.runner.executed
        (failed,) = stream.of(StepFailed)
        assert ("INTERNAL", False, 2) == (failed.reason, failed.sticky, failed.step_id)
        assert "RuntimeError: the kernel did not like it" in failed.message
        assert "frame 1" not in failed.message
        assert [] == executor.fatal

    def test_sticky_device_error_is_reported_and_ends_the_process(self, executor, client):
        """
        After a CUDA error StepFailed says sticky, and the runner asks for the process's end.
        """
        stream = client.attach()
        executor.runner.fails_with = RuntimeError(
            "CUDA error: an illegal memory access was encountered"
        )
        stream.send(client.plan())
        wait_until(lambda: bool(stream.of(StepFailed)))
        assert stream.of(StepFailed)[0].sticky
        wait_until(lambda: bool(executor.fatal))
        assert "illegal memory access" in executor.fatal[0].message

    def test_step_out_of_memory_is_reported_with_advice(self, executor, client, monkeypatch):
        """
        A step for which memory runs out fails OUT_OF_MEMORY naming the setting, and a new session works.
        """
        stream = client.attach()
        decoder = executor.runner._decoder
        with monkeypatch.context() as patch:
            patch.setattr(decoder, "forward", lambda *_arguments: torch.empty(2**50))
            stream.send(client.plan())
            wait_until(lambda: bool(stream.of(StepFailed)))
        (failed,) = stream.of(StepFailed)
        assert ("OUT_OF_MEMORY", False) == (failed.reason, failed.sticky)
        assert "lower chunked_prefill_size or max_total_tokens, or lower buffer_size_gb" in (
            failed.message
        )
        fresh = StepClient(executor)
        assert 1 == fresh.step(fresh.attach()).step_id
        assert [] == executor.fatal

    def test_running_out_of_memory_is_not_sticky(self):
        """
        An allocation that fails leaves the device usable.
        """
        assert not is_sticky(torch.OutOfMemoryError("CUDA out of memory"))
        assert not is_sticky(ValueError("CUDA error"))
        assert is_sticky(RuntimeError("CUDA error: device-side assert triggered"))
        triton = "Triton Error [CUDA]: "
        assert is_sticky(RuntimeError(f"{triton}an illegal memory access was encountered"))
        assert not is_sticky(RuntimeError(f"{triton}out of memory"))
