"""Choices, shared prompts, order and limits, as clients and operators of real services see them."""

from __future__ import annotations

import contextlib

import pytest

from tandem.errors import NeverFits, QueueFull, RequestNotFound
from tandem_client import (
    Delta,
    Done,
    Finished,
    FinishReason,
    RequestEventKind,
    RequestState,
    Scheduled,
    Started,
)
from tests.e2e.cluster import Cluster
from tests.e2e.conftest import running

pytestmark = pytest.mark.slow

LONG = {"max_tokens": 400, "ignore_eos": True}
PROMPT = [5 + i % 90 for i in range(70)]
"""Prompt of four full blocks and six tokens."""


@pytest.fixture(scope="module")
def shared(tiny_model, tmp_path_factory):
    """
    Yield the tiny model with four rows in a batch, limits per tenant, truncation and request
    events.
    """
    limits = ["--max-num-blocks=256", "--max-model-len=512", "--max-batch-size=4"]
    scheduler = [
        "--max-num-seqs=16",
        "--max-tenant-requests=2",
        "--overlength-policy=truncate",
        "--track-request-events",
    ]
    yield from running(Cluster(tiny_model, tmp_path_factory.mktemp("shared"), limits, scheduler))


class TestChoices:
    def test_choices_share_a_prompt_and_differ(self, shared, idle):
        """
        The tokens of choice 0 are those of a single completion, the other choices differ, and the
        prompt counts once.
        """
        asked = {"temperature": 1.0, "seed": 11, "max_tokens": 12, "ignore_eos": True}
        with shared.client() as client:
            single = client.complete(token_ids=PROMPT, **asked)
            several = client.complete(token_ids=PROMPT, n=4, **asked)
        ids = [choice.token_ids for choice in several.choices]
        assert [0, 1, 2, 3] == [choice.choice for choice in several.choices]
        assert single.token_ids == ids[0]
        assert 4 == len(set(ids))
        assert (70, 48) == (several.usage.prompt_tokens, several.usage.output_tokens)
        idle(shared)

    def test_stream_of_choices_follows_the_grammar(self, shared, idle):
        """
        Deltas of each choice have no gap and end with its Finished; Done is last.
        """
        with shared.client() as client:
            events = list(
                client.generate(token_ids=PROMPT, n=3, max_tokens=8, ignore_eos=True, seed=2)
            )
        ids = {choice: [] for choice in range(3)}
        ended = set()
        for event in events:
            if isinstance(event, Delta):
                assert event.choice not in ended
                assert len(ids[event.choice]) == event.first_token_offset
                ids[event.choice] += event.token_ids
            elif isinstance(event, Finished):
                ended.add(event.choice)
        assert isinstance(events[0], Started)
        assert isinstance(events[-1], Done)
        assert ({0, 1, 2}, [8] * 3) == (ended, [len(ids[choice]) for choice in range(3)])
        idle(shared)

    def test_leaving_a_stream_frees_every_choice(self, shared, idle):
        """
        A client that goes away leaves no choice behind.
        """
        with shared.client() as client, client.generate("x", n=4, **LONG) as stream:
            assert isinstance(next(stream), Started)
        idle(shared)

    def test_abort_ends_every_choice(self, shared, idle):
        """
        Abort ends all choices of the request with CANCELLED, and Done counts the tokens up to then.
        """
        with (
            shared.held(num_steps=20),
            shared.client() as client,
            client.generate("x", n=3, request_id="f", **LONG) as stream,
        ):
            begun = set()
            while begun != {0, 1, 2}:
                event = next(stream)
                begun |= {event.choice} if isinstance(event, Delta) else set()
            client.abort("f")
            rest = list(stream)
        reasons = [event.reason for event in rest if isinstance(event, Finished)]
        assert [FinishReason.CANCELLED] * 3 == reasons
        assert isinstance(rest[-1], Done)
        assert 3 <= rest[-1].usage.output_tokens < 3 * LONG["max_tokens"]
        idle(shared)


class TestPrefixCache:
    def test_equal_prompts_share_what_their_salt_allows(self, shared, idle):
        """
        The second of two equal prompts finds its full blocks in the prefix cache, unless its salt
        differs or the cache was flushed; its tokens are the same every time.
        """
        prompt = [90 - token for token in PROMPT]

        def run(**options):
            with shared.client() as client:
                return client.complete(
                    token_ids=prompt, seed=4, max_tokens=8, ignore_eos=True, **options
                )

        plain = [run(), run()]
        salted = [run(cache_salt="pepper"), run(cache_salt="pepper"), run(cache_salt="salt")]
        hits = idle(shared).prefix_cache_hit_tokens
        with shared.admin() as admin:
            assert 0 < admin.flush_prefix_cache()
            assert 0 == admin.stats().cached_blocks
        flushed = run()
        assert [0, 64] == [one.usage.cached_tokens for one in plain]
        assert [0, 64, 0] == [one.usage.cached_tokens for one in salted]
        assert 0 == flushed.usage.cached_tokens
        assert hits >= 128
        assert 1 == len({one.token_ids for one in (*plain, *salted, flushed)})

    def test_progress_tells_what_was_found(self, shared):
        """
        The event Scheduled says how much of the prompt was cached, the same number as usage.
        """
        prompt = [3, *PROMPT]
        with shared.client() as client:
            client.complete(token_ids=prompt, max_tokens=1)
            events = list(client.generate(token_ids=prompt, max_tokens=1))
        told = {event.cached_tokens for event in events if isinstance(event, Scheduled)}
        assert {64} == told == {events[-1].usage.cached_tokens}


class TestOrderAndLimits:
    def test_better_priority_goes_first(self, shared, idle):
        """
        A waiting request with a lower priority number ends before another begins, though it came
        later.
        """
        short = {"max_tokens": 4, "ignore_eos": True}
        with shared.client() as client, contextlib.ExitStack() as stack, shared.held():
            runners = [
                stack.enter_context(client.generate("x", request_id=f"runner-{i}", **LONG))
                for i in range(4)
            ]
            for runner in runners:
                assert isinstance(next(runner), Started)
            shared.gate.allow(8)
            for runner in runners:
                next(event for event in runner if isinstance(event, Delta))
            late = stack.enter_context(client.generate("y", request_id="late", priority=5, **short))
            next(late)
            early = stack.enter_context(
                client.generate("z", request_id="early", priority=-5, **short)
            )
            next(early)
            waiting = shared.requests(states=[RequestState.WAITING])
            assert ["late", "early"] == list(waiting)
            ahead_s = waiting["late"].age_s - waiting["early"].age_s
            client.abort("runner-0")
            shared.gate.allow(40)  # enough for both that wait, too few for the end of a runner
            assert FinishReason.MAX_TOKENS == list(early)[-2].reason
            assert FinishReason.MAX_TOKENS == list(late)[-2].reason
            assert {"runner-1", "runner-2", "runner-3"} == set(shared.requests())
        assert late.done.timings.queue_s >= ahead_s + early.done.timings.total_s - 1e-6
        idle(shared)

    def test_tenant_at_its_limit_is_refused_with_advice(self, shared, idle):
        """
        A tenant's request over its limit is RESOURCE_EXHAUSTED with the limit and RetryInfo; other
        tenants are served, and more choices than a tenant may ever have never fit.
        """
        with shared.client() as client, contextlib.ExitStack() as stack:
            stack.enter_context(shared.held())
            for _ in range(2):
                next(stack.enter_context(client.generate("x", tenant="alice", **LONG)))
            with pytest.raises(QueueFull) as refused:
                client.complete("y", tenant="alice", max_tokens=1)
            others = [
                stack.enter_context(client.generate("y", max_tokens=1, **tenant))
                for tenant in ({"tenant": "bob"}, {})
            ]
            for other in others:
                assert isinstance(next(other), Started)
            shared.gate.allow(40)  # too few for an end of alice's
            for other in others:
                assert isinstance(list(other)[-1], Done)
            with pytest.raises(NeverFits, match="max_tenant_requests is 2"):
                client.complete("y", tenant="carol", n=3)
            assert ["alice"] * 2 == [one.tenant for one in shared.requests(tenant="alice").values()]
        assert ("RESOURCE_EXHAUSTED", "max_tenant_requests") == (
            refused.value.code,
            refused.value.metadata["limit"],
        )
        assert refused.value.retry_after_s > 0
        with shared.admin() as admin:
            assert 0 < admin.stats().refused_by_limit["max_tenant_requests"]
        idle(shared)

    def test_long_prompt_is_truncated_where_asked(self, shared, idle):
        """
        A prompt over max_model_len loses its oldest tokens; the rest gives the same tokens as if
        sent alone.
        """
        prompt = [5 + i % 97 for i in range(700)]
        asked = {"seed": 3, "max_tokens": 16, "ignore_eos": True}
        with shared.client() as client:
            cut = client.complete(token_ids=prompt, **asked)
            whole = client.complete(token_ids=prompt[-496:], **asked)
        assert (496, 204) == (cut.prompt_tokens, cut.truncated_prompt_tokens)
        assert (496, 0) == (whole.prompt_tokens, whole.truncated_prompt_tokens)
        assert whole.token_ids == cut.token_ids
        idle(shared)


class TestOperators:
    def test_live_requests_are_listed(self, shared, idle):
        """
        Each choice in the system is listed with its request's options and its progress.
        """
        asked = {"request_id": "listed", "priority": 3, "tenant": "dora", "n": 2}
        with (
            shared.held(num_steps=8),
            shared.client() as client,
            client.generate(token_ids=PROMPT, **asked, **LONG) as stream,
        ):
            next(event for event in stream if isinstance(event, Delta))
            with shared.admin() as admin:
                found = admin.list_requests(tenant="dora")
        assert [("listed", 0), ("listed", 1)] == [
            (one.request_id, one.choice) for one in found.requests
        ]
        first = found.requests[0]
        assert (3, "dora", 70) == (first.priority, first.tenant, first.prompt_tokens)
        assert 1 <= first.output_tokens <= 400
        assert first.state is RequestState.DECODE
        assert 0 < first.time_to_first_token_s <= first.age_s
        idle(shared)

    def test_events_tell_a_requests_life(self, shared):
        """
        An ended request's events are still there: added, scheduled, finished, in order of time.
        """
        with shared.client() as client, shared.admin() as admin:
            client.complete("x", request_id="remembered", n=2, max_tokens=3, ignore_eos=True)
            events = admin.request_events("remembered")
            with pytest.raises(RequestNotFound):
                admin.request_events("unheard-of")
        for choice in range(2):
            assert [
                RequestEventKind.ADD,
                RequestEventKind.SCHEDULED,
                RequestEventKind.FINISH,
            ] == [event.kind for event in events if event.choice == choice]
        times = [event.at_s for event in events]
        assert sorted(times) == times
        assert (0.0, "MAX_TOKENS") == (times[0], events[-1].detail)

    def test_planning_and_memory_are_accounted_for(self, shared, idle):
        """
        Blocks in use, cached and free add up to all, and planning took some of the uptime.
        """
        idle(shared)
        stats = shared.stats()
        assert stats.total_blocks == stats.used_blocks + stats.cached_blocks + stats.free_blocks
        assert 0 == stats.token_usage
        assert 0 < stats.schedule_s < stats.uptime_s
        assert "lpm" == stats.schedule_policy
