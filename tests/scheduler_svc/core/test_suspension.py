"""Suspension: the executor gives its memory back for a while."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.core.request.options import CoreOptions, PreemptionMode
from scheduler_svc.core.request.request import FinishReason, RequestState
from tandem.link.commands import KvMode, Resume, Suspend
from tandem.link.results import StepResult
from tests.scheduler_svc.core.harness import Rig, small_config

MODES = [KvMode.PERSIST, KvMode.OFFLOAD, KvMode.RECOMPUTE]


class SuspendableRig(Rig):
    """A rig with an executor that takes commands too, and forgets KV where the mode says so."""

    suspended: KvMode | None = None

    def step(self):
        command = self.core.take_command()
        if command is None:
            return super().step()
        self.execute(command)
        while len(self.pending) >= self.delay:
            self.deliver()
        return None

    def execute(self, command):
        """Obey a command; its empty result stays under way."""
        if isinstance(command, Suspend):
            assert self.suspended is None, "suspended twice"
            self.suspended = command.kv_mode
            if command.kv_mode is KvMode.RECOMPUTE:
                assert not self.executor.slots.live.any(), "KV is dropped under a live slot"
                self.executor.memory = type(self.executor)(self.geometry).memory
        else:
            assert isinstance(command, Resume)
            assert self.suspended is not None, "resumed without a suspension"
            self.suspended = None
        self.executor.num_steps += 1
        nothing = np.empty(0, np.int32)
        self.pending.append(
            StepResult(
                boot_id=self.executor.boot_id,
                step_id=self.executor.num_steps,
                slot=nothing,
                generation=nothing.astype(np.uint32),
                position=nothing,
                token=nothing,
            )
        )

    def plan(self):
        batch = super().plan()
        assert self.suspended is None or batch is None, "a batch while memory is given back"
        return batch

    def settle(self):
        """Take turns until the executor is suspended and every result is in."""
        while self.suspended is None or self.pending:
            command = self.core.take_command()
            if command is not None:
                self.execute(command)
            else:
                self.plan()
            if self.pending:
                self.deliver()


def started(delay=1, **options):
    rig = SuspendableRig(
        small_config(max_num_blocks=64), delay=delay, options=CoreOptions(**options)
    )
    for length in (5, 9, 21, 4):
        rig.submit(prompt_len=length, max_tokens=12)
    for _ in range(4):
        rig.step()
    return rig


class TestSuspension:
    @pytest.mark.parametrize("delay", [1, 2, 4])
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("preemption", list(PreemptionMode))
    def test_tokens_are_those_of_an_undisturbed_run(self, delay, mode, preemption):
        """
        Requests suspended in prefill and decode produce the tokens they would have produced.
        """
        rig = started(delay, preemption_mode=preemption)
        rig.core.suspend(mode, rig.now)
        rig.settle()
        assert rig.suspended is mode
        rig.core.resume()
        rig.run()
        assert {handle: rig.outputs[handle] for handle in rig.submitted} == {
            handle: rig.expected(handle) for handle in rig.submitted
        }

    def test_nothing_is_planned_until_resume(self):
        """
        A suspended core plans no step, however often it is asked.
        """
        rig = started()
        rig.core.suspend(KvMode.OFFLOAD, rig.now)
        rig.settle()
        assert [rig.core.schedule(rig.now) for _ in range(3)] == [None] * 3

    def test_requests_are_taken_and_wait(self):
        """
        A request submitted during a suspension waits and runs after the resume.
        """
        rig = started()
        rig.core.suspend(KvMode.PERSIST, rig.now)
        rig.settle()
        late = rig.submit(prompt_len=6, max_tokens=3)
        assert rig.core.state_of(late) is RequestState.WAITING
        rig.core.resume()
        rig.run()
        assert rig.outputs[late] == rig.expected(late)

    def test_recompute_leaves_no_slot_no_block_and_nothing_cached(self):
        """
        Every slot is released and every cached block forgotten before memory is dropped.
        """
        rig = started()
        rig.core.suspend(KvMode.RECOMPUTE, rig.now)
        rig.settle()
        stats = rig.core.stats()
        assert (stats.running_requests, stats.used_blocks, stats.cached_blocks) == (0, 0, 0)
        assert rig.core.waiting_handles() == sorted(rig.core.waiting_handles())

    def test_persist_and_offload_keep_every_block(self):
        """
        Slots and blocks stay as they were when KV is kept.
        """
        rig = started()
        before = rig.core.stats().used_blocks
        rig.core.suspend(KvMode.OFFLOAD, rig.now)
        rig.settle()
        assert rig.core.stats().used_blocks == before

    @pytest.mark.parametrize("mode", MODES)
    def test_a_second_suspension_and_a_resume_without_one_do_nothing(self, mode):
        """
        Repeating a suspension or resuming what runs sends no command.
        """
        rig = started()
        rig.core.resume()
        assert rig.core.take_command() is None
        rig.core.suspend(mode, rig.now)
        rig.settle()
        rig.core.suspend(KvMode.RECOMPUTE, rig.now)
        assert rig.core.take_command() is None
        assert rig.suspended is mode

    def test_a_resume_before_the_command_was_taken_sends_neither(self):
        """
        A suspension that was called off in time never reaches the executor.
        """
        rig = started()
        rig.core.suspend(KvMode.PERSIST, rig.now)
        rig.core.resume()
        assert rig.core.take_command() is None
        rig.run()

    def test_another_mode_asked_for_before_the_resume_was_taken_is_obeyed(self):
        """
        An executor that is resumed and at once suspended in another mode gets both commands.
        """
        rig = started()
        rig.core.suspend(KvMode.PERSIST, rig.now)
        rig.settle()
        rig.core.resume()
        rig.core.suspend(KvMode.RECOMPUTE, rig.now)
        rig.execute(rig.core.take_command())
        assert rig.suspended is None
        rig.settle()
        assert rig.suspended is KvMode.RECOMPUTE
        rig.core.resume()
        rig.run()
        assert all(rig.outputs[handle] == rig.expected(handle) for handle in rig.submitted)

    def test_a_request_can_end_meanwhile(self):
        """
        An abort during a suspension is told at once and frees its blocks after the resume.
        """
        rig = started()
        rig.core.suspend(KvMode.OFFLOAD, rig.now)
        rig.settle()
        rig.core.end_request("r1", FinishReason.CANCELLED, rig.now)
        rig.collect()
        assert rig.ended[1].reason is FinishReason.CANCELLED
        rig.core.resume()
        rig.run()

    def test_another_executor_is_suspended_too(self):
        """
        A new executor is told of the suspension before anything else when the old one is lost
        meanwhile.
        """
        rig = started()
        rig.core.suspend(KvMode.OFFLOAD, rig.now)
        rig.settle()
        rig.lose_executor()
        rig.suspended = None
        rig.settle()
        assert rig.suspended is KvMode.OFFLOAD
        rig.core.resume()
        rig.run()
        assert all(rig.outputs[handle] == rig.expected(handle) for handle in rig.submitted)
