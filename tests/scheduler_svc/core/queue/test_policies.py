"""The order in which each policy admits the requests of one level."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.queue.policies import scatter
from scheduler_svc.core.queue.queue import WaitingQueue
from scheduler_svc.core.request.block_hashes import DIGEST_BYTES, block_digests
from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.options import CoreOptions, SchedulePolicy
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.request.request_parts import Terms
from tandem.engine_config import MAX_LPM_WAITING
from tests.scheduler_svc.core.harness import GREEDY, Rig, queue_position, small_config

BLOCK = 4


class FakeCache:
    """A prefix cache that holds whole prompts and counts what it is asked."""

    def __init__(self, *prompts: list[int]) -> None:
        self.version = 0
        self.digests: set[bytes] = set()
        self.num_matches = 0
        for prompt in prompts:
            self.hold(prompt)

    def hold(self, prompt: list[int]) -> None:
        self.version += 1
        self.digests |= set(_split(_digests(prompt)))

    def drop_all(self) -> None:
        self.version += 1
        self.digests.clear()

    def match_len(self, request: Request) -> int:
        self.num_matches += 1
        digests = _split(self.digests_of(request))
        return BLOCK * next(
            (i for i, digest in enumerate(digests) if digest not in self.digests), len(digests)
        )

    def digests_of(self, request: Request) -> bytes:
        return _digests(request.new.prompt)

    def is_cached(self, digest: bytes) -> bool:
        return digest in self.digests


def _digests(prompt) -> bytes:
    return block_digests(np.array(prompt, np.int32), BLOCK)


def _split(digests: bytes) -> list[bytes]:
    return [digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES)]


def prompt_of(*blocks: int) -> list[int]:
    """Return a prompt of whole blocks, named by numbers, and one token more."""
    return [block for block in blocks for _ in range(BLOCK)] + [999]


def request(number: int, prompt: list[int] | None = None, max_tokens: int = 4) -> Request:
    tokens = np.array(prompt_of(number) if prompt is None else prompt, np.int32)
    new = NewRequest(
        request_id=str(number),
        handle=number,
        prompt=tokens,
        sampling=GREEDY,
        max_tokens=max_tokens,
        arrival_s=0.0,
    )
    return Request(new=new, number=number, terms=Terms(stop_len=len(tokens) + max_tokens))


def queue_of(policy: SchedulePolicy, requests: list[Request]) -> WaitingQueue:
    queue = WaitingQueue(CoreOptions(schedule_policy=policy))
    for entry in requests:
        queue.add(entry, 0.0)
    return queue


def order_of(queue: WaitingQueue, cache: FakeCache | None = None) -> list[int]:
    return [entry.number for entry in queue.in_order(0.0, cache)]


class TestFcfs:
    def test_it_asks_the_cache_nothing(self):
        """
        Requests keep to arrival, and no prompt is matched.
        """
        cache = FakeCache(prompt_of(2))
        queue = queue_of(SchedulePolicy.FCFS, [request(number) for number in range(4)])
        assert ([0, 1, 2, 3], 0) == (order_of(queue, cache), cache.num_matches)


class TestLpm:
    def test_the_longest_cached_prefix_goes_first(self):
        """
        Requests go by how many of their tokens are cached, most first.
        """
        cache = FakeCache(prompt_of(7, 8, 9))
        prompts = [prompt_of(1), prompt_of(7, 1), prompt_of(7, 8, 9), prompt_of(7, 8, 2)]
        queue = queue_of(SchedulePolicy.LPM, [request(i, p) for i, p in enumerate(prompts)])
        assert [2, 3, 1, 0] == order_of(queue, cache)

    def test_equal_prefixes_keep_to_arrival(self):
        """
        The earliest of the requests with equally long cached prefixes goes first.
        """
        cache = FakeCache(prompt_of(7), prompt_of(8))
        prompts = [prompt_of(1), prompt_of(8, 1), prompt_of(7, 2), prompt_of(2), prompt_of(8)]
        queue = queue_of(SchedulePolicy.LPM, [request(i, p) for i, p in enumerate(prompts)])
        assert [1, 2, 4, 0, 3] == order_of(queue, cache)

    @pytest.mark.parametrize(
        ("num_waiting", "first"), [(MAX_LPM_WAITING, 127), (MAX_LPM_WAITING + 1, 0)]
    )
    def test_beyond_128_waiting_it_is_fcfs(self, num_waiting, first):
        """
        The cached request goes first with 128 waiting, and the earliest, unmatched, with 129.
        """
        cache = FakeCache(prompt_of(127))
        requests = [request(number) for number in range(num_waiting)]
        queue = queue_of(SchedulePolicy.LPM, requests)
        assert first == next(queue.candidates(0.0, cache)).number
        assert (num_waiting if first else 0) == cache.num_matches

    def test_those_that_ran_count_as_waiting(self):
        """
        Requests that ran before count among the 128.
        """
        cache = FakeCache(prompt_of(127))
        queue = queue_of(SchedulePolicy.LPM, [request(number) for number in range(128)])
        queue.put_back(request(200), 0.0)
        assert [200, 0, 1] == order_of(queue, cache)[:3]

    def test_without_a_cache_it_is_fcfs(self):
        """
        Requests keep to arrival under lpm where prefixes are not cached.
        """
        queue = queue_of(SchedulePolicy.LPM, [request(number) for number in (0, 1, 2)])
        assert [0, 1, 2] == order_of(queue)

    def test_nothing_is_matched_again_until_the_cache_changes(self):
        """
        Each prompt is matched once per version of the cache, whichever requests come or go.
        """
        cache = FakeCache(prompt_of(1))
        requests = [request(number) for number in range(3)]
        queue = queue_of(SchedulePolicy.LPM, requests)
        assert [1, 0, 2] == order_of(queue, cache)
        queue.take(requests[1], 0.0)
        queue.add(request(3), 0.0)
        assert ([0, 2, 3], 4) == (order_of(queue, cache), cache.num_matches)
        cache.hold(prompt_of(2))
        assert ([2, 0, 3], 7) == (order_of(queue, cache), cache.num_matches)
        cache.drop_all()
        assert [0, 2, 3] == order_of(queue, cache)


class TestDfsWeight:
    def test_the_branch_most_wait_under_goes_first(self):
        """
        The branch with the most requests beneath it is emptied first at each node.
        """
        prompts = [
            prompt_of(1, 1), prompt_of(2, 1), prompt_of(1, 2), prompt_of(2, 2), prompt_of(2, 3),
        ]  # fmt: skip
        requests = [request(i, p) for i, p in enumerate(prompts)]
        queue = queue_of(SchedulePolicy.DFS_WEIGHT, requests)
        assert [1, 3, 4, 0, 2] == order_of(queue, FakeCache())

    def test_it_goes_deep_before_it_goes_on(self):
        """
        The heaviest branch within a branch goes first, and a request that ends at a node goes
        behind that node's branches.
        """
        prompts = [
            prompt_of(9), prompt_of(1), prompt_of(1, 2, 3), prompt_of(1, 4, 5), prompt_of(1, 4, 6),
            prompt_of(1, 2, 7), prompt_of(1, 4),
        ]  # fmt: skip
        requests = [request(i, p) for i, p in enumerate(prompts)]
        queue = queue_of(SchedulePolicy.DFS_WEIGHT, requests)
        assert [3, 4, 6, 2, 5, 1, 0] == order_of(queue, FakeCache())

    def test_equal_branches_go_by_arrival(self):
        """
        The branch with the earliest request goes first among those with equally many.
        """
        prompts = [prompt_of(2, 1), prompt_of(1, 1), prompt_of(1, 2), prompt_of(2, 2)]
        requests = [request(i, p) for i, p in enumerate(prompts)]
        queue = queue_of(SchedulePolicy.DFS_WEIGHT, requests)
        assert [0, 3, 1, 2] == order_of(queue, FakeCache())

    def test_a_cached_prefix_is_a_node_of_the_tree(self):
        """
        A lone request under a cached prefix goes ahead of lone ones that share nothing.
        """
        requests = [request(0, prompt_of(1)), request(1, prompt_of(2, 3)), request(2, prompt_of(4))]
        queue = queue_of(SchedulePolicy.DFS_WEIGHT, requests)
        assert [0, 1, 2] == order_of(queue, FakeCache())
        assert [1, 0, 2] == order_of(queue, FakeCache(prompt_of(2)))

    def test_prompts_under_a_block_keep_to_arrival(self):
        """
        Requests without a full block share nothing and go last, by arrival.
        """
        prompts = [[1], [1, 2], prompt_of(3, 1), prompt_of(3, 2), [1]]
        requests = [request(i, p) for i, p in enumerate(prompts)]
        queue = queue_of(SchedulePolicy.DFS_WEIGHT, requests)
        assert [2, 3, 0, 1, 4] == order_of(queue, FakeCache())

    def test_without_a_cache_it_is_fcfs(self):
        """
        Requests keep to arrival under dfs-weight where prefixes are not cached.
        """
        prompts = [prompt_of(1), prompt_of(2, 1), prompt_of(2, 2)]
        requests = [request(i, p) for i, p in enumerate(prompts)]
        assert [0, 1, 2] == order_of(queue_of(SchedulePolicy.DFS_WEIGHT, requests))

    def test_prefixes_nested_very_deep_are_ordered(self):
        """
        Two thousand prompts, each one block longer than the one before, go longest first; the last
        block is shared with no other prompt, so the last two go by arrival.
        """
        chain, cache = _digests([1] * BLOCK * 2000), FakeCache()
        cache.digests_of = lambda one: chain[: (one.number + 1) * DIGEST_BYTES]
        requests = [request(number, [1]) for number in range(2000)]
        queue = queue_of(SchedulePolicy.DFS_WEIGHT, requests)
        assert [1998, 1999, *range(1997, -1, -1)] == order_of(queue, cache)

    @settings(max_examples=120, deadline=None)
    @given(
        st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=25),
        st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=3),
    )
    def test_any_forest_is_ordered_as_its_definition_says(self, paths, cached):
        """
        The order is that of a plain recursive walk over the tree.
        """
        requests = [request(i, prompt_of(*path)) for i, path in enumerate(paths)]
        cache = FakeCache(*(prompt_of(*path) for path in cached))
        queue = queue_of(SchedulePolicy.DFS_WEIGHT, requests)
        assert _walk(list(enumerate(paths)), (), cache) == order_of(queue, cache)


def _walk(group, node, cache) -> list[int]:
    """Return the order of (number, path) pairs under a node by the definition of dfs-weight."""
    depth, children, own = len(node), {}, []
    for number, path in group:
        if len(path) > depth:
            children.setdefault(path[depth], []).append((number, path))
        else:
            own.append(number)
    order = []
    for block, child in sorted(children.items(), key=lambda item: (-len(item[1]), item[1][0][0])):
        path = (*node, block)
        if len(child) == 1 and not cache.is_cached(_split(_digests(prompt_of(*path)))[-1]):
            own.append(child[0][0])
        else:
            order += _walk(child, path, cache)
    return order + sorted(own)


class TestLofAndRandom:
    def test_the_longest_output_goes_first(self):
        """
        Requests under lof go by the output they ask for, longest first, then by arrival.
        """
        requests = [request(i, max_tokens=n) for i, n in enumerate([3, 9, 1, 9, 4])]
        assert [1, 3, 4, 0, 2] == order_of(queue_of(SchedulePolicy.LOF, requests))

    def test_random_is_fixed_and_unlike_arrival(self):
        """
        The order under random follows from the requests' numbers alone and is not that of arrival.
        """
        requests = [request(number) for number in range(64)]
        order = order_of(queue_of(SchedulePolicy.RANDOM, requests))
        assert order == order_of(queue_of(SchedulePolicy.RANDOM, requests))
        assert list(range(64)) == sorted(order)
        kept = sum(earlier < later for earlier, later in pairwise(order))
        assert 20 < kept < 44

    def test_scatter_has_known_values(self):
        """
        The hash is SplitMix64, with its published first outputs from seed 0.
        """
        golden = 0x9E3779B97F4A7C15
        first = [scatter(i * golden % 2**64) for i in range(3)]
        assert [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F] == first


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(SchedulePolicy),
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=3), st.integers(1, 5)),
        min_size=1,
        max_size=30,
    ),
    st.sets(st.integers(0, 29)),
)
def test_taking_one_by_one_follows_the_order(policy, wanted, skipped):
    """
    Candidates come in the queue's order under every policy, each once, taken or passed over.
    """
    requests = [request(i, prompt_of(*path), n) for i, (path, n) in enumerate(wanted)]
    queue, cache, seen = queue_of(policy, requests), FakeCache(prompt_of(1, 2)), []
    order = order_of(queue, cache)
    for candidate in queue.candidates(0.0, cache):
        seen.append(candidate.number)
        if candidate.number not in skipped:
            queue.take(candidate, 0.0)
    assert order == seen
    assert {number for number in order if number in skipped} == {one.number for one in queue}
    queue.check_integrity()


class TestInTheCore:
    @pytest.mark.parametrize(
        ("options", "order"),
        [
            ({"schedule_policy": SchedulePolicy.FCFS}, [3, 4, 5, 6]),
            ({"schedule_policy": SchedulePolicy.LPM}, [5, 4, 6, 3]),
            ({"schedule_policy": SchedulePolicy.LPM, "prefix_caching": False}, [3, 4, 5, 6]),
            ({"schedule_policy": SchedulePolicy.DFS_WEIGHT}, [4, 6, 5, 3]),
            ({"schedule_policy": SchedulePolicy.LOF}, [6, 5, 4, 3]),
        ],
        ids=["fcfs", "lpm", "lpm-without-cache", "dfs-weight", "lof"],
    )
    def test_requests_are_admitted_in_the_order_of_the_policy(self, options, order):
        """
        Requests behind one that holds the only slot wait in their policy's order, which is the
        order that is told to them, and the head is admitted when the slot is free.
        """
        config = small_config(max_batch_size=1, max_num_blocks=64)
        rig = Rig(config, options=CoreOptions(**options, ageing_s=1000.0))
        for prompt in (prompt_of(1, 2, 3), prompt_of(7, 8)):
            rig.submit(prompt=np.array(prompt, np.int32), max_tokens=1)
        rig.run()
        rig.submit(max_tokens=10)
        rig.step()
        prompts = [prompt_of(9), prompt_of(1, 5), prompt_of(7, 8, 9), prompt_of(1, 6)]
        for i, prompt in enumerate(prompts):
            rig.submit(prompt=np.array(prompt, np.int32), max_tokens=i + 1)
        assert order == rig.core.waiting_handles()
        assert [order.index(h) for h in range(3, 7)] == [
            queue_position(rig.core, h) for h in range(3, 7)
        ]
        while before := rig.core.waiting_handles():
            rig.step()
            left = set(rig.core.waiting_handles())
            assert set(before[1:]) <= left, "not the head of the queue was admitted"

    @pytest.mark.parametrize("policy", SchedulePolicy)
    def test_a_preempted_request_is_next_under_every_policy(self, policy):
        """
        A request that lost its slot stands ahead of all of its priority that never ran.
        """
        rig = Rig(small_config(max_batch_size=1), options=CoreOptions(schedule_policy=policy))
        for _ in range(12):
            rig.submit(max_tokens=9, prompt_len=9)
        for _ in range(4):
            rig.step()
        (ran,) = {row.handle for row in rig.core.list_requests() if row.num_output_tokens}
        rig.core.preempt(f"r{ran}")
        while queue_position(rig.core, ran) is None:
            rig.deliver()
        assert 0 == queue_position(rig.core, ran)


class TestCost:
    @pytest.mark.parametrize("policy", SchedulePolicy)
    def test_a_step_that_cannot_admit_leaves_the_queue_alone(self, policy, monkeypatch):
        """
        A step in which every slot is taken asks neither the queue for candidates nor the cache for
        matches.
        """
        rig = Rig(
            small_config(max_batch_size=2, max_num_seqs=1000),
            options=CoreOptions(schedule_policy=policy),
        )
        for _ in range(40):
            rig.submit(max_tokens=20)
        for _ in range(4):
            rig.step()
        assert 38 == rig.core.stats().waiting_requests

        def fail(*_args):
            pytest.fail("the queue was ordered for nothing")

        for name in ("candidates", "in_order", "_aged", "_not_aged"):
            monkeypatch.setattr(WaitingQueue, name, fail)
        for _ in range(10):
            rig.step()

    @pytest.mark.slow
    @pytest.mark.parametrize("policy", [SchedulePolicy.FCFS, SchedulePolicy.LOF])
    def test_the_head_of_a_long_queue_is_found_without_ordering_it(self, policy):
        """
        Asking for the first of 5,000 candidates looks at a handful of them.
        """
        queue = queue_of(policy, [CountedRequest.of(number) for number in range(5000)])
        CountedRequest.num_reads = 0
        for _ in range(20):
            queue.take(next(queue.candidates(0.0, None)), 0.0)
        assert CountedRequest.num_reads < 20 * 20


class CountedRequest(Request):
    """A request that counts how often its number is read."""

    num_reads = 0

    @classmethod
    def of(cls, number: int) -> CountedRequest:
        plain = request(number)
        return cls(new=plain.new, number=number, terms=plain.terms)

    def __getattribute__(self, name):
        if name == "number":
            CountedRequest.num_reads += 1
        return super().__getattribute__(name)
