"""
Schedule policies: the order of admission among requests of one level that never ran.

A level follows from priority and waiting time, see `queue.WaitingQueue`. Source: the schedule
policies of SGLang. Unlike there, `random` is a fixed permutation, `dfs-weight` sees prefixes that
waiting requests share before any of them is cached, and an order is kept until it may have changed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from scheduler_svc.core.queue.keyed_heap import KeyedHeap
from scheduler_svc.core.request.block_hashes import DIGEST_BYTES
from scheduler_svc.core.request.options import SchedulePolicy
from scheduler_svc.core.request.request import Request
from tandem.engine_config import MAX_LPM_WAITING

_ID_BITS = 64
_MASK = (1 << _ID_BITS) - 1


class PrefixView(Protocol):
    """Prefix cache as the policies see it."""

    @property
    def version(self) -> int:
        """Number that changes whenever an answer of the other methods may change."""

    def match_len(self, request: Request) -> int:
        """Return the number of leading tokens of a request that have cached KV."""

    def digests_of(self, request: Request) -> bytes:
        """Return the digests of the full blocks of its known tokens, 32 bytes each, in order."""

    def is_cached(self, digest: bytes) -> bool:
        """Return True when a block with this digest can be matched."""


class Bucket(Protocol):
    """Requests of one level, in the order of a policy."""

    def add(self, request: Request) -> None:
        """Add a request that arrived after all others here."""

    def discard(self, request: Request) -> None:
        """Remove a request that is here."""

    def __len__(self) -> int: ...

    def numbers(self) -> set[int]:
        """Return the numbers of the requests that are here."""

    def in_order(self, view: PrefixView | None, num_waiting: int) -> Iterator[Request]:
        """
        Yield the requests, next one first. A request that was yielded may be removed meanwhile, but
        none may be added.

        Args:
            view: The prefix cache; None where there is none.
            num_waiting: Requests in the whole queue.
        """


class FcfsBucket:
    """First come, first served: O(1) for every operation and for the head."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        """Add a request behind all others, which is its place."""
        self._waiting[request.number] = request

    def discard(self, request: Request) -> None:
        """Remove a request, in O(1)."""
        del self._waiting[request.number]

    def __len__(self) -> int:
        return len(self._waiting)

    def numbers(self) -> set[int]:
        """Return the numbers of the requests that are here."""
        return set(self._waiting)

    def in_order(self, _view: PrefixView | None, _num_waiting: int) -> Iterator[Request]:
        """Yield in order of arrival; only after a head that stays here are the others listed."""
        while self._waiting:
            head = next(iter(self._waiting.values()))
            yield head
            if head.number in self._waiting:
                yield from self._still_here(list(self._waiting.values())[1:])
                return

    def _still_here(self, order: list[Request]) -> Iterator[Request]:
        return (request for request in order if request.number in self._waiting)


class KeyBucket:
    """Smallest key first, then first come: O(log n) to add and for the head."""

    __slots__ = ("_key", "_waiting")

    def __init__(self, key: Callable[[Request], float]) -> None:
        self._key = key
        self._waiting: KeyedHeap[float, Request] = KeyedHeap()

    def add(self, request: Request) -> None:
        """Add a request by its key, computed now and never again."""
        self._waiting.push(self._key(request), request.number, request)

    def discard(self, request: Request) -> None:
        """Remove a request by its number."""
        self._waiting.discard(request.number)

    def __len__(self) -> int:
        return len(self._waiting)

    def numbers(self) -> set[int]:
        """Return the numbers of the requests that are here."""
        return {request.number for request in self._waiting}

    def in_order(self, _view: PrefixView | None, _num_waiting: int) -> Iterator[Request]:
        """Yield by key, then by arrival."""
        return iter(self._waiting)


class OrderedBucket(FcfsBucket):
    """An order that depends on the prefix cache: kept until the cache changed or one was added."""

    __slots__ = ("_order", "_version")

    def __init__(self) -> None:
        super().__init__()
        self._order: list[Request] = []
        self._version: int | None = None
        """Version of the cache that the order is for; None: a request was added since."""

    def add(self, request: Request) -> None:
        """Add a request; the order is computed anew when it is next asked for."""
        super().add(request)
        self._version = None

    def _order_for(
        self, view: PrefixView, ordered: Callable[[PrefixView], list[Request]]
    ) -> Iterator[Request]:
        """Yield the requests as `ordered` lists them for this version of the cache."""
        if self._version != view.version:
            self._order = ordered(view)
            self._version = view.version
        return self._still_here(self._order)


class LpmBucket(OrderedBucket):
    """
    Longest cached prefix first, then first come; fcfs while more than `MAX_LPM_WAITING` wait.

    Each prompt is matched once per version of the cache.
    """

    __slots__ = ("_matches",)

    def __init__(self) -> None:
        super().__init__()
        self._matches: dict[int, tuple[int, int]] = {}
        """Version of the cache and tokens matched then, by the request's number."""

    def discard(self, request: Request) -> None:
        """Remove a request, and forget what it matched; the order of the others stays."""
        super().discard(request)
        self._matches.pop(request.number, None)

    def in_order(self, view: PrefixView | None, num_waiting: int) -> Iterator[Request]:
        """Yield the longest match first, or in order of arrival where matching would not pay."""
        if view is None or num_waiting > MAX_LPM_WAITING:
            return super().in_order(view, num_waiting)
        return self._order_for(view, self._longest_match_first)

    def _longest_match_first(self, view: PrefixView) -> list[Request]:
        waiting = self._waiting.values()
        return sorted(waiting, key=lambda request: -self._match_len(request, view))

    def _match_len(self, request: Request, view: PrefixView) -> int:
        version, length = self._matches.get(request.number, (None, 0))
        if version != view.version:
            length = view.match_len(request)
            self._matches[request.number] = view.version, length
        return length


class DfsWeightBucket(OrderedBucket):
    """
    Depth first over the tree of shared prefixes, the branch with most waiting requests first.

    A node is a prompt prefix of whole blocks that two waiting requests share or that is cached.
    Each request hangs at its deepest node, behind that node's branches. Ties go to the earlier
    arrival. Ordering takes O(n log n) comparisons of digest chains.
    """

    __slots__ = ()

    def in_order(self, view: PrefixView | None, num_waiting: int) -> Iterator[Request]:
        """Yield along the tree, or in order of arrival without a prefix cache."""
        if view is None:
            return super().in_order(view, num_waiting)
        return self._order_for(view, lambda view: _depth_first(self._waiting.values(), view))


class _Node:
    """
    A prefix that several waiting requests share.

    Attributes:
        depth: Bytes of its chain of digests.
        own: Requests that share no longer prefix with another and have none cached.
        branches: Longer prefixes, and requests with a longer prefix that is cached.
        weight: Number of requests at and under it.
        first: Number of the earliest of them.
    """

    __slots__ = ("branches", "depth", "first", "own", "weight")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.own: list[Request] = []
        self.branches: list[tuple[int, int, _Node | Request]] = []
        self.weight = 0
        self.first = 0

    def hang(self, request: Request, path: bytes, view: PrefixView) -> None:
        """Add a request that has this as its deepest shared prefix."""
        digest = path[self.depth : self.depth + DIGEST_BYTES]
        if digest and view.is_cached(digest):
            self.branches.append((-1, request.number, request))
        else:
            self.own.append(request)
        self._count(1, request.number)

    def adopt(self, node: _Node) -> None:
        """Add a node that is complete."""
        self.branches.append((-node.weight, node.first, node))
        self._count(node.weight, node.first)

    def _count(self, weight: int, first: int) -> None:
        self.first = min(self.first, first) if self.weight else first
        self.weight += weight


def _depth_first(requests: Iterable[Request], view: PrefixView) -> list[Request]:
    """Return the requests in the order that `DfsWeightBucket` describes."""
    order: list[Request] = []
    stack: list[_Node | Request | list[Request]] = [_tree_of(requests, view)]
    while stack:
        top = stack.pop()
        if isinstance(top, _Node):
            stack.append(sorted(top.own, key=lambda request: request.number))
            branches = sorted(top.branches, key=lambda branch: branch[:2], reverse=True)
            stack += [branch for _, _, branch in branches]
        else:
            order += top if isinstance(top, list) else [top]
    return order


def _tree_of(requests: Iterable[Request], view: PrefixView) -> _Node:
    """
    Build the tree of shared prefixes; returns its root.

    Sorted by their chains, requests that share a prefix are neighbours, and the length that each
    shares with the next one tells where nodes begin and end: however deep prefixes nest, each
    request costs a few comparisons.
    """
    paths = sorted(((view.digests_of(one), one) for one in requests), key=lambda path: path[0])
    open_nodes = [_Node(0)]
    for i, (path, request) in enumerate(paths):
        shared = _shared_bytes(path, paths[i + 1][0]) if i + 1 < len(paths) else 0
        if shared > open_nodes[-1].depth:
            open_nodes.append(_Node(shared))
        open_nodes[-1].hang(request, path, view)
        while open_nodes[-1].depth > shared:
            done = open_nodes.pop()
            if open_nodes[-1].depth < shared:
                open_nodes.append(_Node(shared))
            open_nodes[-1].adopt(done)
    return open_nodes[0]


def _shared_bytes(one: bytes, other: bytes) -> int:
    """Return the length, in bytes, of the leading digests that two chains share."""
    if one[:DIGEST_BYTES] != other[:DIGEST_BYTES]:
        return 0
    low, high = 0, min(len(one), len(other)) // DIGEST_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        # Equal digests stand for equal prefixes, so comparing one digest is enough.
        end = middle * DIGEST_BYTES
        if one[end - DIGEST_BYTES : end] == other[end - DIGEST_BYTES : end]:
            low = middle
        else:
            high = middle - 1
    return low * DIGEST_BYTES


def scatter(number: int) -> int:
    """
    Map a 64-bit number to its image under a permutation without visible order.

    Source: the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    word = (number + 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def bucket_of(policy: SchedulePolicy) -> Bucket:
    """Return an empty bucket that is ordered by this policy."""
    match policy:
        case SchedulePolicy.FCFS:
            return FcfsBucket()
        case SchedulePolicy.LPM:
            return LpmBucket()
        case SchedulePolicy.DFS_WEIGHT:
            return DfsWeightBucket()
        case SchedulePolicy.LOF:
            return KeyBucket(lambda request: request.prompt_len - request.terms.stop_len)
        case SchedulePolicy.RANDOM:
            return KeyBucket(lambda request: scatter(request.number))
