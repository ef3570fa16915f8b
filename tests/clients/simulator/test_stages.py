"""Executors with pipeline stages: when each stage computes a step, and what lanes gain."""

from __future__ import annotations

import pytest

from scheduler_svc.core.request.geometry import ExecutorGeometry
from tandem.errors import InvalidConfig
from tandem_simulator.executor.engine import Engine
from tandem_simulator.executor.step_time import StepTime
from tests.clients.simulator.experiments import run
from tests.clients.simulator.test_model import PROMPT, decode, prefill
from tests.clients.simulator.test_simulation import VARIETY

STAGES = pytest.mark.parametrize("pp", ["2", "4"])
FULL = {
    "requests": "100", "request_rate": "2000", "max_num_blocks": "2000", "output_len": "10",
    "prompt_len": "400",
}  # fmt: skip
"""More requests than run together, memory for all that do, and steps full of prompts."""
TIMES = StepTime(
    overhead_s=4.0, weights_s=0.0, token_s=0.0, context_s=0.0, pair_s=0.0, copy_s=0.0, swap_s=0.0,
    link_s=0.0, hop_s=0.5,
)  # fmt: skip


class Port:
    """Port of an engine that is driven by hand."""

    number = 0


@pytest.fixture
def engine():
    """
    Return an executor of two stages, 2 s each for any step, with two prompts under way.
    """
    geometry = ExecutorGeometry(
        num_blocks=16, block_size=4, num_slots=4, max_batch_size=4, max_total_tokens=64,
        max_model_len=32, num_stages=2,
    )  # fmt: skip
    engine = Engine(Port(), geometry, TIMES, 2)
    for slot, blocks in enumerate(([1, 2, 3], [4, 5, 6])):
        engine.send(prefill(slot, 0, PROMPT, blocks), 0.0)
    return engine


def ends(engine: Engine) -> list[float]:
    return [flight.done_s for flight in engine.flights]


class TestTimes:
    def test_stages_compute_different_steps_at_once(self, engine):
        """
        The second stage begins a hop after the first is done, which goes on with the next step.
        """
        assert [0.0, 2.0] == [flight.start_s for flight in engine.flights]
        assert [4.5, 6.5] == ends(engine)

    def test_a_row_waits_for_its_token(self, engine):
        """
        A decode begins a hop after the step that samples its token left the last stage; one of
        another row waits for nothing but the stage.
        """
        start = len(PROMPT)
        assert 5.0 == engine.send(decode(0, start), 0.0).start_s
        assert 7.0 == engine.send(decode(1, start), 0.0).start_s
        assert 10.0 == engine.send(decode(0, start + 1), 0.0).start_s

    def test_one_stage_takes_the_whole_time(self):
        """
        Without stages there is no hop.
        """
        geometry = ExecutorGeometry(
            num_blocks=16, block_size=4, num_slots=4, max_batch_size=4, max_total_tokens=64,
            max_model_len=32,
        )  # fmt: skip
        engine = Engine(Port(), geometry, TIMES)
        flight = engine.send(prefill(0, 0, PROMPT, [1, 2, 3]), 1.0)
        assert (1.0, 5.0) == (flight.start_s, flight.done_s)


class TestLanes:
    @STAGES
    @pytest.mark.parametrize("changes", VARIETY.values(), ids=VARIETY)
    def test_every_request_ends_once(self, changes, pp):
        """
        Each completion of any workload ends once with the tokens of unlimited memory.
        """
        outcome = run(pp=pp, **changes)
        requests = outcome.results["requests"]
        assert requests["sent"] == requests["finished"] == outcome.recorder.num_sent > 0
        assert 0 == outcome.results["over_time"]["used_blocks"][-1]

    def test_a_lost_executor_costs_no_token(self):
        """
        Steps of all lanes that were under way are computed again.
        """
        results = run(pp="4", kill_executor_at="0.3", executor_back_s="0.4", **FULL).results
        assert 100 == results["requests"]["finished"]
        calm = run(pp="4", **FULL).results
        assert calm["tokens"]["output"] == results["tokens"]["output"]
        assert 0 == calm["tokens"]["recomputed"] < results["tokens"]["recomputed"]

    @STAGES
    def test_lanes_keep_the_stages_busy(self, pp):
        """
        With lanes most stages compute at any time; if each step has all decodes, one does.
        """
        told = run(pp=pp, **FULL).results
        not_told = run(pp=pp, all_rows="yes", **FULL).results
        busy = told["steps"]["busy_share"], not_told["steps"]["busy_share"]
        assert busy[1] <= 1.05 / int(pp) < 0.6 < busy[0] <= 1.0
        assert told["duration_s"] < 0.8 * not_told["duration_s"]

    @pytest.mark.parametrize("pp", ["0", "65"])
    def test_numbers_of_stages_that_cannot_be(self, pp):
        """
        A number of stages that no executor may have is refused by name.
        """
        with pytest.raises(InvalidConfig, match=f"pp is {pp}: it must be from 1 to 64"):
            run(pp=pp)
