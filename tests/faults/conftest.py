"""Fixtures of all storms: a model, one with other weights, and the run without a fault."""

from __future__ import annotations

import os
import sys

import pytest

from tests import model_zoo
from tests.faults.processes.executors import Zygote
from tests.faults.processes.other_weights import with_other_weights
from tests.faults.processes.rig import Rig, RigSettings
from tests.faults.report import table
from tests.faults.schedule import make_schedule
from tests.faults.storm import Storm
from tests.faults.workload.reference import make_reference

SEED = int(os.environ.get("STORM_SEED", "7"))
"""Seed of every run, unless $STORM_SEED asks for that of a run that failed."""
TIMES = int(os.environ.get("STORM_TIMES", "2"))
"""Number of times that a storm injects each of its kinds, unless $STORM_TIMES asks for more."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Return a model with random weights that computes a step in a millisecond."""
    return model_zoo.llama_mha(tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture(scope="session")
def other_model(tiny_model, tmp_path_factory):
    """Return the same model with other weights."""
    return with_other_weights(tiny_model, tmp_path_factory.mktemp("model") / "tiny-other")


@pytest.fixture(scope="session")
def zygote(tmp_path_factory):
    """Yield a process that starts executors in a moment."""
    one = Zygote(tmp_path_factory.mktemp("zygote"))
    yield one
    one.close()


@pytest.fixture(scope="session")
def reference(tiny_model, zygote, tmp_path_factory):
    """Return the outputs of all requests when no fault is injected."""
    return make_reference(tmp_path_factory.mktemp("reference"), tiny_model, zygote)


@pytest.fixture
def storm(reference, tiny_model, other_model, zygote, tmp_path):
    """
    Yield a function that runs a storm of some kinds and returns it and the lines of its table.
    """
    rigs = []

    def run(kinds, *, times=TIMES, until=lambda _: True, **settings):
        rig = Rig(tmp_path, RigSettings(model=tiny_model, **settings), zygote)
        rigs.append(rig)
        rig.start()
        one = Storm(rig=rig, reference=reference, seed=SEED, other_weights=other_model)
        lines = one.run(make_schedule(SEED, kinds, times), until=until)
        sys.stdout.write(f"\n{table(lines)}\n{one.phases()}\n")
        return one, lines

    yield run
    for rig in rigs:
        rig.close()
