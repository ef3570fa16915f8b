"""Clusters that tests share, since starting one takes seconds."""

from __future__ import annotations

import pytest

from tests import model_zoo
from tests.e2e.cluster import BUNDLED_MODEL, Cluster, wait_idle


def running(cluster):
    """Start the executor, yield the cluster, and kill everything at the end."""
    try:
        cluster.start_executor()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Return a model with random weights that computes a step in a millisecond."""
    return model_zoo.llama_mha(tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture(scope="session")
def bundled_model():
    """Return the model that comes with the project."""
    return BUNDLED_MODEL


@pytest.fixture(scope="session")
def small(tiny_model, tmp_path_factory):
    """Yield the tiny model with room for two requests at once and two more in the queue."""
    limits = ["--max-num-blocks=64", "--max-model-len=512", "--max-batch-size=2"]
    scheduler = ["--max-num-seqs=4"]
    yield from running(Cluster(tiny_model, tmp_path_factory.mktemp("small"), limits, scheduler))


@pytest.fixture(scope="session")
def bundled(tmp_path_factory):
    """Yield the bundled model with default limits, but short steps so that prompts take many."""
    folder = tmp_path_factory.mktemp("bundled")
    yield from running(Cluster(BUNDLED_MODEL, folder, ["--max-total-tokens=256"], []))


@pytest.fixture
def idle():
    """Return a function that waits until a cluster holds nothing and does nothing."""
    return lambda cluster: wait_idle(cluster.stats)
