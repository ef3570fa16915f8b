"""
In which order requests that never ran are admitted, among those of one level.

A level is what priority and waiting leave, see `queue.WaitingQueue`. Source: the schedule policies
of SGLang. Unlike there, `random` is a fixed permutation, `dfs-weight` sees prefixes that waiting
requests share before any of them is cached, and an order is kept until it may have changed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from scheduler_svc.block_hashes import DIGEST_BYTES
from scheduler_svc.core.keyed_heap import KeyedHeap
from scheduler_svc.core.options import SchedulePolicy
from scheduler_svc.core.request import Request

MAX_LPM_WAITING = 128
"""While more than this wait, lpm is fcfs: matching every prompt would cost more than it saves."""

_ID_BITS = 64
_MASK = (1 << _ID_BITS) - 1


class PrefixView(Protocol):
    """What policies ask of the prefix cache."""

    @property
    def version(self) -> int:
        """Changes whenever another answer may."""

    def match_len(self, request: Request) -> int:
        """Leading tokens of a request whose KV is cached."""

    def digests_of(self, request: Request) -> bytes:
        """Digests of the full blocks of its prompt, 32 bytes each, one after the other."""

    def is_cached(self, digest: bytes) -> bool:
        """True when a block with this digest can be matched."""


class Bucket(Protocol):
    """Requests of one level, in the order of a policy."""

    def add(self, request: Request) -> None:
        """Take a request in that arrived after all others here."""

    def discard(self, request: Request) -> None:
        """Remove a request that is here."""

    def __len__(self) -> int: ...

    def in_order(self, view: PrefixView | None, num_waiting: int) -> Iterator[Request]:
        """
        Who goes next, then who goes next if that one stays, and so on; whoever was yielded may
        leave meanwhile, nobody may come.

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
        """See `Bucket`."""
        self._waiting[request.number] = request

    def discard(self, request: Request) -> None:
        """See `Bucket`."""
        del self._waiting[request.number]

    def __len__(self) -> int:
        return len(self._waiting)

    def in_order(self, _view: PrefixView | None, _num_waiting: int) -> Iterator[Request]:
        """See `Bucket`."""
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
        self._waiting: KeyedHeap[Request] = KeyedHeap()

    def add(self, request: Request) -> None:
        """See `Bucket`."""
        self._waiting.push(self._key(request), request.number, request)

    def discard(self, request: Request) -> None:
        """See `Bucket`."""
        self._waiting.discard(request.number)

    def __len__(self) -> int:
        return len(self._waiting)

    def in_order(self, _view: PrefixView | None, _num_waiting: int) -> Iterator[Request]:
        """See `Bucket`."""
        return iter(self._waiting)


class LpmBucket(FcfsBucket):
    """
    Longest cached prefix first, then first come; fcfs while more than `MAX_LPM_WAITING` wait.

    Each prompt is matched once per version of the cache, and sorting waits until the cache or the
    bucket changed.
    """

    __slots__ = ("_matches", "_order", "_version")

    def __init__(self) -> None:
        super().__init__()
        self._matches: dict[int, tuple[int, int]] = {}
        """Number to version of the cache and tokens matched then."""
        self._order: list[Request] = []
        self._version: int | None = None

    def add(self, request: Request) -> None:
        """See `Bucket`."""
        super().add(request)
        self._version = None

    def discard(self, request: Request) -> None:
        """See `Bucket`."""
        super().discard(request)
        self._matches.pop(request.number, None)

    def in_order(self, view: PrefixView | None, num_waiting: int) -> Iterator[Request]:
        """See `Bucket`."""
        if view is None or num_waiting > MAX_LPM_WAITING:
            return super().in_order(view, num_waiting)
        if self._version != view.version:
            waiting = self._waiting.values()
            self._order = sorted(waiting, key=lambda request: -self._match_len(request, view))
            self._version = view.version
        return self._still_here(self._order)

    def _match_len(self, request: Request, view: PrefixView) -> int:
        version, length = self._matches.get(request.number, (None, 0))
        if version != view.version:
            length = view.match_len(request)
            self._matches[request.number] = view.version, length
        return length


class DfsWeightBucket(FcfsBucket):
    """
    Depth first over the tree of shared prefixes, the branch most requests wait under first.

    A node is a prompt prefix of whole blocks that two waiting requests share or that is cached.
    Each request hangs at its deepest node, behind that node's branches. Ties go to whoever came
    first. Ordering takes O(n log n) comparisons of digest chains, when the cache or the bucket
    changed.
    """

    __slots__ = ("_order", "_version")

    def __init__(self) -> None:
        super().__init__()
        self._order: list[Request] = []
        self._version: int | None = None

    def add(self, request: Request) -> None:
        """See `Bucket`."""
        super().add(request)
        self._version = None

    def in_order(self, view: PrefixView | None, num_waiting: int) -> Iterator[Request]:
        """See `Bucket`."""
        if view is None:
            return super().in_order(view, num_waiting)
        if self._version != view.version:
            self._order = _depth_first(list(self._waiting.values()), view)
            self._version = view.version
        return self._still_here(self._order)


def _depth_first(requests: list[Request], view: PrefixView) -> list[Request]:
    """Order requests, given by arrival, as `DfsWeightBucket` says."""
    path = {request.number: view.digests_of(request) for request in requests}
    order: list[Request] = []
    # Groups still to visit, next one last, with the bytes of digests their requests share.
    stack = [(requests, 0)]
    while stack:
        group, shared = stack.pop()
        if len(group) == 1 or shared < 0:
            order += group
            continue
        paths = [path[request.number] for request in group]
        # Unbranching stretches are skipped: min and max differ where any two of a group do.
        shared = _shared_bytes(min(paths), max(paths), shared)
        branches: dict[bytes, list[Request]] = {}
        for request in group:
            digest = path[request.number][shared : shared + DIGEST_BYTES]
            branches.setdefault(digest, []).append(request)
        own = branches.pop(b"", [])
        for digest, branch in list(branches.items()):
            if len(branch) == 1 and not view.is_cached(digest):
                own += branches.pop(digest)
        by_weight = sorted(branches.values(), key=lambda branch: (-len(branch), branch[0].number))
        stack.append((sorted(own, key=lambda request: request.number), -1))
        stack += [(branch, shared + DIGEST_BYTES) for branch in reversed(by_weight)]
    return order


def _shared_bytes(one: bytes, other: bytes, low: int) -> int:
    """Bytes of the digests that two chains share, at least `low`."""
    high = min(len(one), len(other))
    while low < high:
        middle = (low + high) // DIGEST_BYTES // 2 * DIGEST_BYTES + DIGEST_BYTES
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - DIGEST_BYTES
    return low


def scatter(number: int) -> int:
    """
    A permutation of the 64-bit numbers without visible order.

    Source: the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    word = (number + 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def bucket_of(policy: SchedulePolicy) -> Bucket:
    """An empty bucket that is ordered by this policy."""
    match policy:
        case SchedulePolicy.FCFS:
            return FcfsBucket()
        case SchedulePolicy.LPM:
            return LpmBucket()
        case SchedulePolicy.DFS_WEIGHT:
            return DfsWeightBucket()
        case SchedulePolicy.LOF:
            return KeyBucket(lambda request: request.prompt_len - request.stop_len)
        case SchedulePolicy.RANDOM:
            return KeyBucket(lambda request: scatter(request.number))
