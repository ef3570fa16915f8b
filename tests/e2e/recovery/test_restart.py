"""A scheduler that dies, is stopped, or loses a frontend while streams run: clients see a pause."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import pytest

from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from tandem.status import from_rpc_error
from tandem_client import Client, Delta, FinishReason, PromptLogprobs, RetryPolicy, is_serving
from tests.e2e.cluster import Cluster, paused
from tests.e2e.recovery.failover import NO_LEASE_MS
from tests.ports import free_port
from tests.waiting import LIMIT_S, wait_until

pytestmark = pytest.mark.slow

NUM_TOKENS = 450
LONG = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
TANDEM = Path(sys.executable).with_name("tandem")
ENOUGH = 8
"""Number of tokens that every choice of every stream has when its scheduler dies."""
NUM_STEPS = 40
"""Number of steps that suffices for those tokens, and ends no stream."""


@dataclass
class Read:
    """One stream as its reader got it, by choice."""

    stream: object = None
    ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    scored: list[int] = field(default_factory=list)
    """Ids of the prompt whose log probabilities were told."""
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
            if isinstance(event, PromptLogprobs):
                into.scored += event.token_ids
            if isinstance(event, Delta):
                ids = into.ids.setdefault(event.choice, [])
                assert len(ids) == event.first_token_offset
                ids += event.token_ids
                into.texts[event.choice] = into.texts.get(event.choice, "") + event.text
    return into


def generate(address: str, request: pb.GenerateRequest):
    """Make the bare call, as a client of any language does."""
    return InferenceServiceStub(grpc.insecure_channel(address)).Generate(request)


def has_begun(read: Read, options: dict) -> bool:
    lengths = [len(ids) for ids in read.ids.values()]
    return len(lengths) == options.get("n", 1) and min(lengths) >= ENOUGH


def requests_of_all_kinds(address: str) -> list[dict]:
    """
    Return 16 requests: greedy with scores of the prompt, greedy, sampled with the server's seed, with penalties, from some ids alone,
    with two choices, with stop strings that are cut off and one that stays.
    """
    prompts = [f"request {number} asks for" for number in range(16)]
    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.3}
    greedy = {"temperature": 0.0, **LONG}
    drawn = {"temperature": 1.0, **LONG}
    requests = [{"prompt": prompt, **greedy} for prompt in prompts[:2]]
    requests += [{"prompt": prompt, **greedy, **penalties} for prompt in prompts[2:4]]
    requests += [{"prompt": prompt, **drawn} for prompt in prompts[4:6]]
    requests += [{"prompt": prompt, **drawn, **penalties} for prompt in prompts[6:7]]
    for one in requests[:2]:
        one["prompt_logprobs"] = 1
    requests.append({"prompt": prompts[7], "allowed_token_ids": list(range(40, 90)), **drawn})
    requests += [{"prompt": prompt, "n": 2, **drawn} for prompt in prompts[8:12]]
    with Client(address) as client:
        for prompt in prompts[12:]:
            whole = client.complete(prompt, **greedy).text
            stops = [whole[at : at + 4] for at in range(len(whole) // 2, len(whole) - 4)]
            late = next(stop for stop in stops if whole.index(stop) >= len(whole) // 2)
            stays = prompt == prompts[-1]
            requests.append({"prompt": prompt, "stop": [late], "include_stop": stays, **greedy})
    return requests


def again(address: str, options: dict, broken: Read) -> Read:
    """Send the same request again and read its stream without a break."""
    seed = {} if options["temperature"] == 0 else {"seed": broken.stream.started.params.seed}
    return read(address, options | seed, Read())


def survive(cluster: Cluster, strike: Callable[[list[Read]], object]) -> list[Read]:
    """
    End the scheduler with `strike` when all 16 streams have begun, and start another; check that
    each stream comes to what it would have been. The executor holds its next step until `strike`,
    which gets the streams, is done.
    """
    requests = requests_of_all_kinds(cluster.address)
    reads = [Read() for _ in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        with cluster.held():
            address = cluster.address
            tasks = [pool.submit(read, address, *one) for one in zip(requests, reads, strict=True)]
            num_sequences = sum(one.get("n", 1) for one in requests)
            wait_until(lambda: cluster.num_requests() == num_sequences, "all of them at once")
            cluster.gate.allow(NUM_STEPS)
            wait_until(lambda: all(map(has_begun, reads, requests)), "tokens of all streams")
            strike(reads)
        cluster.start_scheduler()  # an executor that is held at a session's end exits
        wait_until(cluster.is_ready, "tandem.ready")
        for task in tasks:
            task.result(LIMIT_S)
        wholes = list(
            pool.map(lambda one: again(cluster.address, *one), zip(requests, reads, strict=True))
        )
    assert all(one.breaks for one in reads)
    for whole, broken in zip(wholes, reads, strict=True):
        assert not whole.breaks
        assert whole.outcome() == broken.outcome()
        assert whole.scored == broken.scored
        assert whole.stream.done.usage.output_tokens == broken.stream.done.usage.output_tokens
        assert whole.stream.done.usage.prompt_tokens == broken.stream.done.usage.prompt_tokens
    return reads


@pytest.fixture(scope="module")
def cluster(tiny_model, tmp_path_factory):
    """
    Yield a scheduler that hands requests over at once when it stops, and an executor that stays.
    """
    limits = ["--max-num-blocks=1024", "--max-model-len=512", "--max-batch-size=32"]
    scheduler = ["--drain-grace-s=0", "--frontends=2", f"--lease-ms={NO_LEASE_MS}"]
    cluster = Cluster(tiny_model, tmp_path_factory.mktemp("restart"), limits, scheduler)
    try:
        cluster.start_executor()
        yield cluster
    finally:
        cluster.close()


class TestScheduler:
    def test_streams_survive_its_death(self, cluster, idle):
        """
        A scheduler that is killed and started again leaves every stream with the output of an
        unbroken one; its executor stays, is ready without waiting for the end of a lease, and holds
        nothing of the dead scheduler.
        """
        survive(cluster, lambda _: cluster.scheduler.kill())
        idle(cluster)

    def test_streams_survive_its_stop(self, cluster, idle):
        """
        A scheduler that is stopped without grace hands every stream over and exits with 0, and the
        next one takes the executor at once.
        """

        def strike(reads):
            cluster.scheduler.process.terminate()
            wait_until(lambda: all(one.breaks for one in reads), "all streams to be handed over")
            cluster.gate.open()
            assert 0 == cluster.scheduler.process.wait(LIMIT_S)

        reads = survive(cluster, strike)
        assert {"HANDED_OVER"} == {one.breaks[0] for one in reads}
        idle(cluster)

    def test_streams_survive_the_death_of_a_frontend(self, cluster, idle):
        """
        A frontend that dies takes the service down with a failure, and streams of both frontends go
        on in the next one.
        """

        def strike(_):
            frontends = cluster.scheduler.family()[1:]
            assert 2 == len(frontends)
            frontends[0].kill()
            assert 1 == cluster.scheduler.process.wait(LIMIT_S)

        survive(cluster, strike)
        idle(cluster)

    def test_printed_stream_survives_its_death(self, cluster):
        """
        The command `tandem generate` prints the text of an unbroken stream, with a line on stderr
        about the pause.
        """
        arguments = ["--seed=3", "--temperature=1", f"--max-tokens={NUM_TOKENS}", "--ignore-eos"]
        with Client(cluster.address) as client:
            expected = client.complete("hello", seed=3, temperature=1.0, **LONG).text
        with contextlib.ExitStack() as stack:
            with cluster.held(NUM_STEPS):
                command = stack.enter_context(
                    subprocess.Popen(
                        [TANDEM, "generate", "hello", f"--address={cluster.address}", *arguments],
                        bufsize=0,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                    )
                )
                begun = command.stdout.read(ENOUGH)
                cluster.scheduler.kill()
            cluster.start_scheduler()
            rest, errors = command.communicate(timeout=LIMIT_S)
        assert 0 == command.returncode, errors
        assert f"{expected}\n" == (begun + rest).decode()
        assert b"looking for a server to go on" in errors


class TestDrain:
    def test_successor_goes_on_where_a_drained_scheduler_stopped(self, cluster, idle):
        """
        A drain hands a stream over and gives the executor back: another scheduler, with another
        name, is ready long before the lease would end, and goes on after the ids that any client
        sends it.
        """
        first = cluster.scheduler
        request = pb.GenerateRequest(
            text="hello",
            sampling={"temperature": 1.0},
            stopping=LONG,
        )
        ids, text = [], ""
        with cluster.held(NUM_STEPS):
            call = generate(cluster.address, request)
            for message in call:
                if message.HasField("started"):
                    seed = message.started.sampling.seed
                ids += message.delta.token_ids
                text += message.delta.text
                if len(ids) >= ENOUGH:
                    break
            with cluster.admin() as admin:
                assert 1 == admin.drain(grace_s=0.0)
        wait_until(lambda: not cluster.is_ready(), "both frontends to know of it")
        error = None
        try:
            for message in call:
                ids += message.delta.token_ids
                text += message.delta.text
        except grpc.RpcError as broken:
            error = from_rpc_error(broken)
        assert ("HANDED_OVER", str(len(ids))) == (error.reason, error.metadata["tokens_emitted"])

        cluster.address = f"127.0.0.1:{free_port()}"
        cluster.start_scheduler()
        wait_until(cluster.is_ready, "tandem.ready")
        request.sampling.seed = seed
        request.resume.choices.add(choice=0, token_ids=ids)
        rest = list(generate(cluster.address, request))
        assert len(ids) == rest[0].started.resumed_tokens
        with Client(cluster.address) as client:
            whole = client.complete("hello", seed=seed, temperature=1.0, **LONG)
        assert whole.token_ids == (*ids, *(i for m in rest for i in m.delta.token_ids))
        assert whole.text == text + "".join(message.delta.text for message in rest)
        assert (whole.usage.prompt_tokens, NUM_TOKENS) == (
            rest[-1].done.usage.prompt_tokens,
            rest[-1].done.usage.output_tokens,
        )
        first.process.terminate()
        assert 0 == first.process.wait(LIMIT_S)
        idle(cluster)


class TestLiveness:
    def test_stopped_core_is_not_alive_and_comes_back(self, cluster):
        """
        A stopped core process makes its frontends report that they are not alive; once it goes on,
        so do its streams.
        """
        took = Read()
        is_alive = partial(is_serving, cluster.address, "", timeout_s=60)
        with ThreadPoolExecutor(1) as pool:
            with cluster.held(NUM_STEPS):
                task = pool.submit(read, cluster.address, {"prompt": "hello", **LONG}, took)
                wait_until(lambda: has_begun(took, {}), "tokens")
                with paused(cluster.scheduler.process.pid):
                    wait_until(lambda: not is_alive(), "liveness off")
                wait_until(is_alive, "liveness on")
            task.result(LIMIT_S)
        assert ([], NUM_TOKENS) == (took.breaks, len(took.ids[0]))
