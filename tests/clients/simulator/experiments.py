"""Small simulations that tests run."""

from __future__ import annotations

from tandem_simulator.results.comparison import Outcome, run_one
from tandem_simulator.settings import build
from tandem_simulator.simulation import Simulation

SMALL = {
    "machine": "h100-8b-tight",
    "requests": "60",
    "request_rate": "40",
    "prompt_len": "lognormal:80:0.8:400",
    "output_len": "lognormal:30:0.6:100",
    "max_tokens": "100",
    "max_num_blocks": "120",
    "max_model_len": "1024",
    "max_total_tokens": "256",
    "max_batch_size": "16",
    "num_host_blocks": "200",
}
"""A workload that fills its memory and is over in a moment."""


def run(**changes) -> Outcome:
    """Run the small workload with changes, everything checked."""
    return run_one({**SMALL, "check": "true", **changes})


def simulation(**changes) -> Simulation:
    """The small workload, ready to run."""
    experiment = build({**SMALL, **changes})
    return Simulation(experiment.setup, experiment.requests)
