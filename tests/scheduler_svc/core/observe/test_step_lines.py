"""The line of a step in the words of Megatron Core's log."""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.observe.step_lines import Load, StepLines, step_line
from tandem.admin.v1.stats_pb2 import GetStatsResponse as Stats
from tandem.link.batch import Batch
from tandem.link.commands import KvMode, Suspend
from tandem.link.results import StepResult, StepTimings

LOAD = Load(stats=Stats(), max_requests=32, paused_blocks=0, paused_budget_blocks=0)


def batch(*num_tokens):
    return Batch(row_num_tokens=np.array(num_tokens, np.int32))


def result(**changes):
    empty = np.empty(0, np.int32)
    return StepResult(
        boot_id="boot",
        step_id=1,
        slot=empty,
        generation=empty.astype(np.uint32),
        position=empty,
        token=empty,
        **changes,
    )


def words(command, outcome, load=LOAD):
    return line(command, outcome, load).text


def line(command, outcome, load=LOAD):
    return step_line(command, outcome, load, step=40, time_of_day="01:02:03")


class TestStepLine:
    def test_every_number_is_in_its_place(self):
        """
        The time is that of computing; requests, blocks and memory are those after the step.
        """
        stats = Stats(
            running_requests=5,
            paused_requests=2,
            waiting_requests=7,
            finished_requests=11,
            preemptions=13,
            used_blocks=17,
            total_blocks=64,
        )
        load = Load(stats=stats, max_requests=32, paused_blocks=3, paused_budget_blocks=9)
        outcome = result(
            timings=StepTimings(queued_ns=5_000_000, total_ns=6_500_000),
            device_memory_bytes=2_340_000_000,
        )
        assert (
            "* rank 0 | step 40 | 01:02:03 ... time: 1.500 ms [non-decode + real config [14]: "
            "2 P + 1 D + cuda graph OFF] ... reqs: a 3/32, p 2, w 7, f 11, e 13 ... "
            "blocks: a 17/64, p 3/9 ... mem: 2.3 gb"
        ) == words(batch(1, 8, 5), outcome, load)
        values = line(batch(1, 8, 5), outcome, load).values
        assert (3, 2, 7) == tuple(
            values[f"{kind}_requests"] for kind in ("active", "paused", "waiting")
        )
        assert (1.5, 17, 64) == (
            values["step_ms"],
            values["used_blocks"],
            values["total_blocks"],
        )

    def test_decodes_from_a_graph_say_which(self):
        """
        A step of decodes alone is named so, and the tokens of its graph are told.
        """
        said = words(batch(1, 1, 1), result(graph=4))
        assert "[decode + real config [3]: 0 P + 3 D + cuda graph [4]]" in said

    def test_command_that_computes_nothing_is_named(self):
        """
        A suspension is a step without a shape.
        """
        assert "[suspend]" in words(Suspend(kv_mode=KvMode.PERSIST), result())


class TestStepLines:
    def test_load_is_asked_only_where_a_line_is_due(self):
        """
        Steps between two lines cost no snapshot of the core.
        """
        num_asked = 0

        def load():
            nonlocal num_asked
            num_asked += 1
            return LOAD

        steps = StepLines(3, lambda: "01:02:03")
        said = [steps.line(batch(1), result(), load) for _ in range(7)]
        assert [2, 5] == [at for at, line in enumerate(said) if line is not None]
        assert 2 == num_asked
