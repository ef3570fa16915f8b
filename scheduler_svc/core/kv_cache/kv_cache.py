"""KV cache of one executor: device blocks, the prefix cache over them, and host blocks."""

from __future__ import annotations

from scheduler_svc.core.kv_cache.block_pool import BlockPool
from scheduler_svc.core.kv_cache.host_blocks import HostBlocks, HostCopy
from scheduler_svc.core.kv_cache.prefix_cache import PrefixCache
from scheduler_svc.core.kv_cache.prefix_index import PrefixIndex
from scheduler_svc.core.request.geometry import Limits
from scheduler_svc.core.request.options import CoreOptions, Eviction, PreemptionMode
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.slots.slots import SlotTable
from tandem.errors import InternalError


class KvCache:
    """
    KV memory of one executor; it is replaced together with the slots when the executor is lost.

    Attributes:
        pool: Device blocks.
        prefix_cache: Prefix cache over pool and slots.
        host: Host blocks, which hold the KV of swapped-out requests.
    """

    __slots__ = (
        "_block_size",
        "_prefix_caching",
        "_swapping",
        "_swaps",
        "host",
        "pool",
        "prefix_cache",
    )

    def __init__(
        self, limits: Limits, options: CoreOptions, slots: SlotTable, first_version: int = 0
    ) -> None:
        """
        Args:
            limits: Numbers of blocks.
            options: Prefix caching, eviction and preemption mode.
            slots: The slots whose block tables hold the blocks.
            first_version: Version of the empty prefix cache, higher than any of the cache that it
                replaces: queue orders made for the old one must not be taken for orders of this.
        """
        self.pool = _pool(limits, options, first_version)
        self.prefix_cache = PrefixCache(slots, self.pool)
        self.host = HostBlocks(limits.num_host_blocks)
        self._swapping: dict[int, int] = {}
        """Slots to be released with a copy to host memory, with the number of the last request."""
        self._block_size = limits.block_size
        self._prefix_caching = options.prefix_caching
        self._swaps = options.preemption_mode is PreemptionMode.SWAP

    @property
    def prefixes(self) -> PrefixCache | None:
        """Prefix cache, for the order of the queue; None where prefix caching is off."""
        return self.prefix_cache if self._prefix_caching else None

    def try_plan_swap(self, slot: int, request: Request) -> bool:
        """
        Reserve host blocks for a request that has lost its slot, where preemption swaps and it has
        computed anything; returns False where host blocks are too few.
        """
        if not self._swaps or not request.place.planned:
            return True
        may_index = self.prefix_cache.may_index(slot)
        if not self.host.try_reserve(
            request.number, request.place.planned, self._block_size, may_index=may_index
        ):
            return False
        self._swapping[slot] = request.number
        return True

    def take_planned_swap(self, slot: int) -> tuple[int, HostCopy] | None:
        """
        Return the number of the request that a slot about to be released is to be copied out for,
        and its host blocks; None without one, as when that request has ended since.
        """
        number = self._swapping.pop(slot, None)
        copy = None if number is None else self.host.copy_of(number)
        return None if number is None or copy is None else (number, copy)

    @property
    def has_planned_swaps(self) -> bool:
        """True while any slot is to be copied to host memory at its release."""
        return bool(self._swapping)

    def flush(self) -> int:
        """Drop the prefix cache; returns the number of blocks freed, which only it had kept."""
        self.host.forbid_indexing()
        return self.prefix_cache.flush()

    def check_integrity(self, slots: SlotTable, without_slot: set[int]) -> None:
        """
        Compare with the slots and with the numbers of the live requests that have none.

        Raises:
            InternalError: A block is lost or has a wrong count of holders, or a copy no owner.
        """
        self.pool.check_integrity(slots.owned_blocks())
        self.prefix_cache.check_integrity()
        self.host.check_integrity(without_slot)
        if not self._swapping.keys() <= set(slots.vacated()):
            raise InternalError("a slot is to be swapped out and not released")


def _pool(limits: Limits, options: CoreOptions, first_version: int) -> BlockPool:
    if not options.prefix_caching:
        return BlockPool(limits.num_blocks)
    keeps_unheld = options.eviction is Eviction.LRU
    index = PrefixIndex(limits.num_blocks, keeps_unheld=keeps_unheld, first_version=first_version)
    return BlockPool(limits.num_blocks, index)
