"""Bursts of calls, and connections that are ended for their age, on real services."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from tandem_client import Client
from tests.e2e.cluster import Cluster
from tests.faults.abuse.public_port import burst
from tests.waiting import wait_until

AGED_S = 1.0
NUM_STREAMS = 8
NUM_BREAKS = 3
"""Number of connections that each stream outlasts, before its output could be complete."""
STEPS_BETWEEN = 50
LONG = {"token_ids": [5, 6, 7, 8], "max_tokens": 400, "ignore_eos": True, "seed": 1}


def accepted(cluster):
    """Return the number of requests that the core has accepted, resumed ones counted again."""
    return cluster.stats().accepted_requests


@pytest.mark.slow
class TestBurst:
    @pytest.mark.parametrize(
        ("num_calls", "num_connections"),
        [(1_000, 40), (8_000, 16)],
    )
    def test_every_call_is_served_or_refused_with_a_reason(self, small, num_calls, num_connections):
        """
        Of calls that come all at once each is served, or refused with a reason and a time.
        """
        assert 0 == burst(small, num_calls, num_connections)["wrong statuses"]


class TestConnectionAge:
    @pytest.fixture
    def aging(self, tiny_model, tmp_path):
        """Yield a cluster whose connections are ended every second, with their calls."""
        ages = [f"--max-connection-age-s={AGED_S}", "--max-connection-age-grace-s=0.2"]
        cluster = Cluster(tiny_model, tmp_path, ["--max-num-blocks=512"], ages)
        try:
            cluster.start_executor()
            yield cluster
        finally:
            cluster.close()

    @pytest.mark.slow
    def test_resuming_client_loses_nothing(self, aging):
        """
        Streams that outlast several connections have the ids of one that did not: none is lost,
        repeated or changed.
        """

        def ids(number: int) -> list[int]:
            with Client(aging.address) as client:
                events = client.generate(**LONG, request_id=f"aged-{number}")
                return list(
                    itertools.chain.from_iterable(
                        event.token_ids for event in events if hasattr(event, "token_ids")
                    )
                )

        with ThreadPoolExecutor(NUM_STREAMS) as pool, aging.held():
            found = [pool.submit(ids, number) for number in range(NUM_STREAMS)]
            for num_breaks in range(NUM_BREAKS + 1):
                wanted = NUM_STREAMS * (1 + num_breaks)
                wait_until(lambda: accepted(aging) >= wanted, "streams on new connections")  # noqa: B023  # called at once
                aging.gate.allow(STEPS_BETWEEN)
        outputs = [one.result() for one in found]
        assert [LONG["max_tokens"]] * NUM_STREAMS == [len(output) for output in outputs]
        assert [outputs[0]] * NUM_STREAMS == outputs
