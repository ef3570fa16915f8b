"""Suspending a service and resuming it, as its clients and operators see it."""

from __future__ import annotations

import contextlib

import pytest

from tandem.errors import NoExecutor
from tandem_client import Delta, FinishReason, KvMode
from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.conftest import running

ASKED = {"max_tokens": 120, "temperature": 1.0, "ignore_eos": True}
PROMPTS = [[5 + (i + start) % 90 for i in range(40)] for start in range(3)]


@pytest.fixture(scope="module")
def suspendable(tiny_model, tmp_path_factory):
    """A cluster that nobody else uses."""
    folder = tmp_path_factory.mktemp("suspendable")
    limits = ["--max-num-blocks=64", "--max-model-len=512", "--max-batch-size=4"]
    yield from running(Cluster(tiny_model, folder, limits, []))


@pytest.fixture(scope="module")
def undisturbed(suspendable):
    """What each prompt gives alone."""
    with suspendable.client() as client:
        return [
            client.complete(token_ids=prompt, seed=seed, **ASKED).token_ids
            for seed, prompt in enumerate(PROMPTS)
        ]


def begin(client, stack):
    """A stream per prompt, each with some output."""
    streams = [
        stack.enter_context(client.generate(token_ids=prompt, seed=seed, **ASKED))
        for seed, prompt in enumerate(PROMPTS)
    ]
    return [(stream, list(first_delta(stream).token_ids)) for stream in streams]


def first_delta(stream):
    return next(event for event in stream if isinstance(event, Delta))


def rest(stream):
    return [token for event in stream if isinstance(event, Delta) for token in event.token_ids]


@pytest.mark.slow
class TestSuspend:
    @pytest.mark.parametrize("mode", list(KvMode))
    def test_requests_go_on_with_the_same_tokens(self, suspendable, undisturbed, idle, mode):
        """
        Whatever becomes of KV memory, who ran and who came meanwhile gets the tokens it would have
        had; nothing is computed in between, and readiness is off.
        """
        with (
            suspendable.client() as client,
            suspendable.admin() as admin,
            contextlib.ExitStack() as stack,
        ):
            under_way = begin(client, stack)
            admin.suspend(mode)
            admin.suspend(mode)
            wait_until(lambda: not suspendable.is_ready(), "unready")
            steps = admin.stats().steps
            late = stack.enter_context(client.generate(token_ids=PROMPTS[0], seed=0, **ASKED))
            assert "started" == type(next(late)).__name__.lower()
            stats = admin.stats()
            assert (True, steps) == (stats.suspended, stats.steps)
            admin.resume()
            admin.resume()
            found = [tuple(ids + rest(stream)) for stream, ids in under_way]
            assert undisturbed[0] == tuple(rest(late))
            assert not admin.stats().suspended
        assert undisturbed == found
        wait_until(suspendable.is_ready, "ready again")
        idle(suspendable)

    def test_a_suspended_request_can_be_cancelled(self, suspendable, idle):
        """
        Abort takes effect while nothing is computed.
        """
        with suspendable.client() as client, suspendable.admin() as admin:
            with client.generate("x", request_id="asleep", **ASKED) as stream:
                first_delta(stream)
                admin.suspend(KvMode.OFFLOAD)
                client.abort("asleep")
                reason = next(e.reason for e in stream if hasattr(e, "reason"))
            admin.resume()
        assert FinishReason.CANCELLED == reason
        idle(suspendable)

    def test_an_executor_that_comes_back_is_suspended_again(self, suspendable, undisturbed, idle):
        """
        When the executor dies meanwhile the suspension stays, and resuming loses no token.
        """
        with (
            suspendable.client() as client,
            suspendable.admin() as admin,
            contextlib.ExitStack() as stack,
        ):
            under_way = begin(client, stack)
            admin.suspend(KvMode.RECOMPUTE)
            suspendable.executor.kill()
            wait_until(lambda: not admin.stats().executor_attached, "detached")
            with pytest.raises(NoExecutor):
                admin.suspend()
            suspendable.start_executor(ready=False)
            wait_until(lambda: admin.stats().executor_attached, "attached again")
            assert admin.stats().suspended
            admin.resume()
            assert undisturbed == [tuple(ids + rest(stream)) for stream, ids in under_way]
        idle(suspendable)
