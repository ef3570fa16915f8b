"""Counters of the core and the message that tells them."""

from __future__ import annotations

from scheduler_svc.core.observe.stats import Counters
from tandem.admin.v1.stats_pb2 import GetStatsResponse


class TestCounters:
    def test_every_counter_has_a_field(self):
        """
        Each counter begins at 0 and has its own value in the message that operators get, refusals by their limits.
        """
        counters = Counters()
        fields = counters.by_field()
        assert fields.keys() <= {field.name for field in GetStatsResponse.DESCRIPTOR.fields}
        assert GetStatsResponse() == GetStatsResponse(**fields)
        counters.preemption.preemptions, counters.preemption.swap_fallbacks = 3, 4
        counters.compute.steps, counters.faults.executor_deaths = 5, 6
        counters.requests.note_refused("max_num_seqs")
        counters.requests.note_refused(None)
        expected = GetStatsResponse(
            preemptions=3,
            swap_fallbacks=4,
            steps=5,
            executor_deaths=6,
            refused_requests=2,
            refused_by_limit={"max_num_seqs": 1},
        )
        assert expected == GetStatsResponse(**counters.by_field())
