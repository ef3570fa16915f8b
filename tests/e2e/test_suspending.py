"""A service that is suspended and resumed, as its clients and operators see it."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from tandem.errors import NoExecutor, OutOfMemory
from tandem_client import Delta, FinishReason, KvMode, Started
from tests.e2e.cluster import Cluster
from tests.e2e.conftest import running
from tests.waiting import wait_until

ASKED = {"max_tokens": 120, "temperature": 1.0, "ignore_eos": True}
NUM_STEPS = 20
"""Number of steps that suffices for the first ids of all streams, and ends none of them."""
PROMPTS = [[5 + (i + start) % 90 for i in range(40)] for start in range(3)]


@pytest.fixture(scope="module")
def suspendable(tiny_model, tmp_path_factory):
    """Yield a cluster that no other test uses."""
    folder = tmp_path_factory.mktemp("suspendable")
    limits = ["--max-num-blocks=64", "--max-model-len=512", "--max-batch-size=4"]
    yield from running(Cluster(tiny_model, folder, limits, []))


@pytest.fixture(scope="module")
def undisturbed(suspendable):
    """Return the tokens that each prompt gets alone."""
    with suspendable.client() as client:
        return [
            client.complete(token_ids=prompt, seed=seed, **ASKED).token_ids
            for seed, prompt in enumerate(PROMPTS)
        ]


@pytest.fixture
def host_limit(suspendable):
    """Yield the file that says how much memory the executor's host has left; remove it after."""
    yield suspendable.host_limit
    suspendable.host_limit.unlink(missing_ok=True)


@contextlib.contextmanager
def under_way(cluster, client, *prompts):
    """
    Yield a stream per prompt and its first ids, far from their ends: the executor is held until it
    is to suspend, or the block ends.
    """
    with contextlib.ExitStack() as stack, cluster.held():
        streams = [
            stack.enter_context(client.generate(token_ids=prompt, seed=seed, **ASKED))
            for seed, prompt in enumerate(prompts)
        ]
        for stream in streams:
            assert isinstance(next(stream), Started)
        cluster.gate.allow(NUM_STEPS)
        yield [(stream, list(first_delta(stream).token_ids)) for stream in streams]


def suspend(cluster, admin, mode):
    """Suspend, and let the executor end the steps that it holds once no more are planned."""
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(admin.suspend, mode)
        try:
            wait_until(
                lambda: call.done() or admin.stats().suspended, "a suspension that was asked for"
            )
        finally:
            cluster.gate.open()
        call.result()


def first_delta(stream):
    return next(event for event in stream if isinstance(event, Delta))


def rest(stream):
    return [token for event in stream if isinstance(event, Delta) for token in event.token_ids]


@pytest.mark.slow
class TestSuspend:
    @pytest.mark.parametrize("mode", list(KvMode))
    def test_requests_go_on_with_the_same_tokens(self, suspendable, undisturbed, idle, mode):
        """
        A request that ran before, or came during, a suspension gets the tokens that it would have
        had in every KV mode; no step is computed in between, and readiness is off.
        """
        with (
            suspendable.client() as client,
            suspendable.admin() as admin,
            under_way(suspendable, client, *PROMPTS) as streams,
        ):
            suspend(suspendable, admin, mode)
            admin.suspend(mode)
            wait_until(lambda: not suspendable.is_ready(), "unready")
            steps = admin.stats().steps
            late = client.generate(token_ids=PROMPTS[0], seed=0, **ASKED)
            assert isinstance(next(late), Started)
            stats = admin.stats()
            assert (True, steps) == (stats.suspended, stats.steps)
            admin.resume()
            admin.resume()
            found = [tuple(ids + rest(stream)) for stream, ids in streams]
            assert undisturbed[0] == tuple(rest(late))
            assert not admin.stats().suspended
        assert undisturbed == found
        wait_until(suspendable.is_ready, "ready again")
        idle(suspendable)

    def test_a_suspension_that_the_host_has_no_room_for_is_refused(
        self, suspendable, undisturbed, host_limit, idle
    ):
        """
        The operator learns what is short, where and what to do; requests go on with the tokens that
        they would have had, and another KV mode can be asked for at once.
        """
        with (
            suspendable.client() as client,
            suspendable.admin() as admin,
            under_way(suspendable, client, *PROMPTS) as streams,
        ):
            losses = admin.stats().executor_losses
            host_limit.write_text("4096")
            with pytest.raises(OutOfMemory, match="suspend with PERSIST or RECOMPUTE") as refused:
                suspend(suspendable, admin, KvMode.OFFLOAD)
            assert suspendable.executor_address in refused.value.message
            assert undisturbed == [tuple(ids + rest(stream)) for stream, ids in streams]
            stats = admin.stats()
            assert (False, losses + 1) == (stats.suspended, stats.executor_losses)
            admin.suspend(KvMode.RECOMPUTE)
            assert admin.stats().suspended
            admin.resume()
        idle(suspendable)

    def test_a_suspended_request_can_be_cancelled(self, suspendable, idle):
        """
        Abort takes effect while the service is suspended.
        """
        with suspendable.client() as client, suspendable.admin() as admin:
            with under_way(suspendable, client, PROMPTS[0]) as ((stream, _),):
                suspend(suspendable, admin, KvMode.OFFLOAD)
                client.abort(stream.started.request_id)
                reason = next(e.reason for e in stream if hasattr(e, "reason"))
            admin.resume()
        assert FinishReason.CANCELLED == reason
        idle(suspendable)

    def test_an_executor_that_comes_back_is_suspended_again(self, suspendable, undisturbed, idle):
        """
        A suspension stays when the executor dies meanwhile, and resuming loses no token.
        """
        with (
            suspendable.client() as client,
            suspendable.admin() as admin,
            under_way(suspendable, client, *PROMPTS) as streams,
        ):
            suspend(suspendable, admin, KvMode.RECOMPUTE)
            suspendable.executor.kill()
            wait_until(lambda: not admin.stats().executor_attached, "detached")
            with pytest.raises(NoExecutor):
                admin.suspend()
            suspendable.start_executor(ready=False)
            wait_until(lambda: admin.stats().executor_attached, "attached again")
            assert admin.stats().suspended
            admin.resume()
            assert undisturbed == [tuple(ids + rest(stream)) for stream, ids in streams]
        idle(suspendable)
