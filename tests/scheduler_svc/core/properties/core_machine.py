"""The core's world as a state machine for hypothesis."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.scheduler_svc.core.properties.core_world import EVERYTHING, CoreWorld


class CoreMachine(RuleBasedStateMachine):
    """
    Random requests, steps, late results, ends, NaNs, preemptions and executor losses.

    The fake executor checks the owner of each KV position, the rig that every batch keeps to the
    limits and that tokens arrive once and in order; integrity is checked after every change.
    """

    @initialize(data=st.data())
    def start(self, data):
        """
        Make an engine small enough that every limit is met, under any options, with or without
        stages.
        """
        num_stages = data.draw(st.sampled_from([1, 1, 2, 4]))
        self.world = CoreWorld(
            lambda values: data.draw(st.sampled_from(values)), num_stages=num_stages
        )

    @rule(
        data=st.data(), name=st.sampled_from([n for n, w in EVERYTHING.items() for _ in range(w)])
    )
    def happen(self, data, name):
        """
        Let something happen.
        """
        getattr(self.world, name)(lambda values: data.draw(st.sampled_from(values)))

    @invariant()
    def outputs_are_those_of_the_prefix(self):
        """
        Check that the outputs so far are a prefix of what unlimited memory would give.
        """
        if hasattr(self, "world"):
            self.world.check_outputs()

    def teardown(self):
        """
        Check that in the end all is finished, all tokens are there and all blocks are back.
        """
        if hasattr(self, "world"):
            self.world.finish()


def check(examples: int, steps: int, **changes) -> None:
    """Search for a history that breaks a promise."""
    run_state_machine_as_test(
        CoreMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            **changes,
        ),
    )
