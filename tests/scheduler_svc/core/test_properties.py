"""Whatever happens in whatever order, the core keeps its promises."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from scheduler_svc.core.request import FinishReason
from tandem.errors import TandemError
from tests.scheduler_svc.core.harness import Rig, small_config

ENDS = st.sampled_from([frozenset(), frozenset(), frozenset({3}), frozenset(range(10))])


class CoreMachine(RuleBasedStateMachine):
    """
    Random requests, steps, late results, aborts, deadlines, NaNs and executor losses.

    The fake executor checks limits, the order of rows and who owns each KV position; the rig
    checks integrity after every change and that tokens arrive once and in order.
    """

    @initialize(
        delay=st.sampled_from((4, 2, 1)),
        num_blocks=st.sampled_from((8, 12, 24)),
        max_batch_size=st.sampled_from((2, 4)),
        max_total_tokens=st.sampled_from((4, 7, 32)),
        block_size=st.sampled_from((1, 4, 7)),
        threshold=st.sampled_from((0.6, 1.0)),
    )
    def start(self, *, delay, num_blocks, max_batch_size, max_total_tokens, block_size, threshold):
        """
        An engine small enough that every limit is met.
        """
        self.cut: set[int] = set()
        self.rig = Rig(
            small_config(
                block_size=block_size,
                max_num_blocks=num_blocks,
                max_batch_size=max_batch_size,
                max_total_tokens=max_total_tokens,
                max_model_len=max(block_size, min(48, num_blocks * block_size)),
                memory_threshold=threshold,
                max_num_seqs=12,
            ),
            delay=delay,
        )

    @rule(
        count=st.integers(1, 4),
        prompt_len=st.sampled_from((1, 2, 3, 5, 8, 13, 30)),
        max_tokens=st.sampled_from((1, 4, 12, 20, 20, 28)),
        eos=ENDS,
        stops=ENDS,
        lives_s=st.sampled_from([None, None, None, 3, 20]),
    )
    def submit(self, *, count, prompt_len, max_tokens, eos, stops, lives_s):
        """
        Requests arrive together; a refused one is typed.
        """
        deadline_s = None if lives_s is None else self.rig.now + lives_s
        for _ in range(count):
            with suppress(TandemError):
                handle = self.rig.submit(
                    prompt_len, max_tokens, eos_token_ids=eos, stop_token_ids=stops,
                    deadline_s=deadline_s,
                )  # fmt: skip
                if deadline_s is not None:
                    self.cut.add(handle)

    @rule(times=st.integers(1, 12))
    def step(self, times):
        """
        Time passes.
        """
        for _ in range(times):
            self.rig.step()

    @rule()
    def plan_ahead(self):
        """
        A batch goes out without a result coming in.
        """
        if len(self.rig.pending) < 4:
            self.rig.plan()

    @precondition(lambda self: self.rig.core.num_requests)
    @rule(data=st.data())
    def abort(self, data):
        """
        Somebody goes away.
        """
        live = sorted(self.rig.core._state.by_handle)
        handle = data.draw(st.sampled_from(live))
        self.cut.add(handle)
        self.rig.core.end_request(f"r{handle}", FinishReason.CANCELLED, self.rig.now)
        self.rig.collect()

    @precondition(lambda self: self.rig.core._state.slots.running.any())
    @rule(data=st.data())
    def poison(self, data):
        """
        The model produces NaN for one row from now on.
        """
        slots = self.rig.core._state.slots
        slot = data.draw(st.sampled_from(slots.running.nonzero()[0].tolist()))
        self.cut.add(int(slots.handle[slot]))
        self.rig.executor.poisoned.add((slot, int(slots.generation[slot])))

    @rule()
    def lose_executor(self):
        """
        The executor dies.
        """
        self.rig.lose_executor()

    @invariant()
    def outputs_are_those_of_the_prefix(self):
        """
        What has come out is a prefix of what unlimited memory would give.
        """
        if hasattr(self, "rig"):
            for handle, outputs in self.rig.outputs.items():
                assert self.rig.expected(handle)[: len(outputs)] == outputs

    def teardown(self):
        """
        In the end all is finished, all tokens are there and all blocks are back.
        """
        if not hasattr(self, "rig"):
            return
        self.rig.run()
        for handle in self.rig.submitted:
            assert (handle in self.rig.ended) != (handle in self.rig.failed)
            if handle not in self.cut:
                assert self.rig.expected(handle) == self.rig.outputs[handle]


def check(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        CoreMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


class TestProperties:
    def test_any_history_keeps_every_promise(self):
        """
        Under any mix of events limits hold, nothing leaks or starves, and tokens are exact.
        """
        check(examples=60, steps=30)

    @pytest.mark.slow
    def test_many_long_histories_keep_every_promise(self):
        """
        The same over many more and longer histories.
        """
        check(examples=500, steps=60)
