"""A frontend process that is stopped for a while, beside another that is not."""

from contextlib import ExitStack
from urllib.request import urlopen

import pytest

from tandem.inference.v1.inference_service_pb2 import GenerateRequest
from tandem_bench.reader import start_reader
from tandem_client import NO_RETRY, AdminClient
from tests.e2e.cluster import PATIENCE, Process, num_requests, paused
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

NUM_STREAMS = 24
MAX_TOKENS = 3000
CONNECTIONS = NUM_STREAMS
"""
Number of connections; the kernel spreads them over frontends, and so many never go to one alone.
"""


@pytest.fixture
def executor(tmp_path):
    """Yield an executor with steps of a millisecond."""
    process = Process(
        "tandem_bench.fixed_step",
        ["--step-ms=1", f"--rows={NUM_STREAMS}", f"--listen=unix:{tmp_path}/executor.sock"],
        tmp_path,
        "executor",
    )
    try:
        process.addresses()
        yield process
    finally:
        process.end()


@pytest.fixture
def service(executor, tmp_path):
    """Yield a scheduler with two frontends."""
    address = executor.addresses()["address"]
    scheduler = Process(
        "scheduler_svc",
        [
            f"--executor={address}",
            "--listen=127.0.0.1:0",
            "--admin-listen=127.0.0.1:0",
            "--metrics-listen=127.0.0.1:0",
            "--frontends=2",
            *PATIENCE,
        ],
        tmp_path,
        "scheduler",
    )
    try:
        scheduler.addresses()
        yield scheduler
    finally:
        scheduler.end()


def frontends(scheduler: Process) -> list[int]:
    """Return the pids of the frontends, in order of their indices."""
    found = {}
    for process in scheduler.family()[1:]:
        command = " ".join(process.cmdline())
        if "scheduler_svc.frontend" in command:
            found['"index":1' in command] = process.pid
    return [found[False], found[True]]


def metric(addresses: dict, name: str) -> float:
    """Return the value of the one metric with this in its name."""
    with urlopen(f"http://{addresses['metrics_address']}/metrics") as page:
        lines = page.read().decode().splitlines()
    (value,) = {
        line.split()[-1]
        for line in lines
        if name in line and not line.startswith("#") and "_created" not in line
    }
    return float(value)


def request(number: int) -> bytes:
    return GenerateRequest(
        token_ids={"ids": [5 + number] * 8},
        stopping={"max_tokens": MAX_TOKENS, "ignore_eos": True},
    ).SerializeToString()


def test_stopped_frontend_delays_its_own_streams_only(service, executor):
    """
    A stopped frontend holds up neither the core nor the other frontend's streams; the tokens of its
    own streams are merged, and come in order, none missing, when it goes on.
    """
    addresses = service.addresses()
    requests = [request(number) for number in range(NUM_STREAMS)]
    _, second = frontends(service)
    with ExitStack() as stack:
        admin = stack.enter_context(AdminClient(addresses["admin_address"], retry=NO_RETRY))
        with ExitStack() as pauses:
            with paused(executor.process.pid):
                reader = stack.enter_context(
                    start_reader(addresses["address"], requests, connections=CONNECTIONS)
                )
                wait_until(lambda: reader.report().started == NUM_STREAMS, "all streams started")
                pauses.enter_context(paused(second))
            wait_until(lambda: num_requests(admin.stats()) == 0, "the core to end everybody")
            assert metric(addresses, "merged_updates") > 0
            wait_until(lambda: reader.report().over > 0, "the other one's streams to end")
            held_back = reader.report()
            assert 0 < held_back.over < NUM_STREAMS
            assert (0, 0) == (held_back.failed, held_back.bad_offsets)
        counts = wait_until(
            lambda: (found := reader.report()).over == NUM_STREAMS and found, "all streams to end"
        )
        assert ({"0": NUM_STREAMS}, 0) == (counts.statuses, counts.bad_offsets)
        total = NUM_STREAMS * MAX_TOKENS
        assert (total, total) == (counts.tokens, counts.done_tokens)
        assert 0 == admin.stats().used_blocks
    assert "integrity_check_failed" not in service.log.read_text()
