"""A scheduler that dies, is stopped, or loses a frontend, while streams run: clients see a pause."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from tandem_client import Client, Delta, FinishReason, RetryPolicy
from tests.e2e.cluster import Cluster, wait_until

pytestmark = pytest.mark.slow

LONG = {"max_tokens": 300, "ignore_eos": True}
ENOUGH = 8
"""Tokens that every choice of every stream has when its scheduler dies."""


@dataclass
class Read:
    """One stream as its reader got it, by choice."""

    stream: object = None
    ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    breaks: list[str] = field(default_factory=list)

    def outcome(self) -> dict[int, tuple[tuple[int, ...], str, FinishReason]]:
        return {
            choice: (tuple(self.ids[choice]), self.texts[choice], end.reason)
            for choice, end in self.stream.finished_choices.items()
        }


def read(address: str, options: dict, into: Read, *, retry: RetryPolicy | None = None) -> Read:
    """Read a stream to its end, checking every offset."""
    policy = retry or RetryPolicy(on_break=lambda error, _: into.breaks.append(error.reason))
    with Client(address, retry=policy) as client:
        into.stream = client.generate(**options)
        for event in into.stream:
            if isinstance(event, Delta):
                ids = into.ids.setdefault(event.choice, [])
                assert len(ids) == event.first_token_offset
                ids += event.token_ids
                into.texts[event.choice] = into.texts.get(event.choice, "") + event.text
    return into


def has_begun(read: Read, options: dict) -> bool:
    lengths = [len(ids) for ids in read.ids.values()]
    return len(lengths) == options.get("n", 1) and min(lengths) >= ENOUGH


def requests_of_all_kinds(address: str) -> list[dict]:
    """Sixteen: greedy, drawn with the server's seed, several choices, and ended by stop strings."""
    prompts = [f"request {number} asks for" for number in range(16)]
    greedy = {"temperature": 0.0, **LONG}
    drawn = {"temperature": 1.0, **LONG}
    requests = [{"prompt": prompt, **greedy} for prompt in prompts[:4]]
    requests += [{"prompt": prompt, **drawn} for prompt in prompts[4:8]]
    requests += [{"prompt": prompt, "n": 2, **drawn} for prompt in prompts[8:12]]
    with Client(address) as client:
        for prompt in prompts[12:]:
            whole = client.complete(prompt, **greedy).text
            stops = [whole[at : at + 4] for at in range(len(whole) // 2, len(whole) - 4)]
            late = next(stop for stop in stops if whole.index(stop) >= len(whole) // 2)
            requests.append({"prompt": prompt, "stop": [late], **greedy})
    return requests


def again(address: str, options: dict, broken: Read) -> Read:
    """The same request without a break."""
    seed = {} if options["temperature"] == 0 else {"seed": broken.stream.started.params.seed}
    return read(address, options | seed, Read())


def survive(cluster: Cluster, strike: Callable[[], None]) -> list[Read]:
    """Strike when all sixteen streams run; check that each comes to what it would have been."""
    requests = requests_of_all_kinds(cluster.address)
    reads = [Read() for _ in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        address = cluster.address
        tasks = [pool.submit(read, address, *one) for one in zip(requests, reads, strict=True)]
        wait_until(lambda: all(map(has_begun, reads, requests)), "tokens of all streams")
        strike()
        for task in tasks:
            task.result(120)
        wholes = list(
            pool.map(lambda one: again(cluster.address, *one), zip(requests, reads, strict=True))
        )
    for whole, broken in zip(wholes, reads, strict=True):
        assert broken.breaks, "the stream was over before the scheduler was struck"
        assert not whole.breaks
        assert whole.outcome() == broken.outcome()
        assert whole.stream.done.usage.output_tokens == broken.stream.done.usage.output_tokens
        assert whole.stream.done.usage.prompt_tokens == broken.stream.done.usage.prompt_tokens
    return reads


@pytest.fixture(scope="module")
def cluster(tiny_model, tmp_path_factory):
    """A scheduler whose requests are handed over at once when it stops, and an executor that stays."""
    limits = ["--max-num-blocks=1024", "--max-model-len=512", "--max-batch-size=32"]
    scheduler = ["--drain-grace-s=0", "--frontends=2", "--lease-ms=60000"]
    cluster = Cluster(tiny_model, tmp_path_factory.mktemp("restart"), limits, scheduler)
    try:
        cluster.start_executor()
        yield cluster
    finally:
        cluster.close()


class TestScheduler:
    def test_streams_survive_its_death(self, cluster, idle):
        """
        Killed and started again, the scheduler leaves every stream with the output of an unbroken one; its executor
        stays, is ready without waiting for a lease of a minute, and holds nothing of the dead.
        """

        def strike():
            cluster.scheduler.kill()
            cluster.start_scheduler()
            wait_until(cluster.is_ready, "tandem.ready", 20)

        survive(cluster, strike)
        idle(cluster)

    def test_streams_survive_its_stop(self, cluster, idle):
        """
        Stopped without grace it hands every stream over, exits with 0, and the next one takes the executor at once.
        """

        def strike():
            cluster.scheduler.process.terminate()
            assert 0 == cluster.scheduler.process.wait(30)
            cluster.start_scheduler()
            wait_until(cluster.is_ready, "tandem.ready", 20)

        for broken in survive(cluster, strike):
            assert "HANDED_OVER" == broken.breaks[0]
        idle(cluster)

    def test_streams_survive_the_death_of_a_frontend(self, cluster, idle):
        """
        A frontend that dies takes the service down with a failure, and streams of both go on in the next one.
        """

        def strike():
            frontends = cluster.scheduler.family()[1:]
            assert 2 == len(frontends)
            frontends[0].kill()
            assert 1 == cluster.scheduler.process.wait(30)
            cluster.start_scheduler()

        survive(cluster, strike)
        idle(cluster)
