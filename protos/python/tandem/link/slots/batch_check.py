"""
Checks that a batch fits the slot state, before any part of it takes effect.

The checks follow the order of effects (release, swap, copy, admit, append, rows) on copies of the
small per-slot columns, and cost time proportional to the batch. If a batch fails them, the
scheduler has a bug or the two ends have diverged: either way the session is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.errors import SessionLost
from tandem.link.batch import ROW_SAMPLES, Admission, Batch, Int32Column
from tandem.link.refusal import in_slot
from tandem.link.slots.slot_columns import SlotColumns


@dataclass(slots=True)
class _After:
    """Copies of per-slot columns, with the effects of the batch's parts checked so far."""

    live: NDArray[np.bool_]
    planned: Int32Column
    num_tokens_known: Int32Column
    num_blocks_held: Int32Column


def check_batch(slots: SlotColumns, batch: Batch) -> None:
    """
    Check a batch against the slot state to which it is a delta.

    Raises:
        SessionLost: A rule does not hold; the text has the first one, with slot or block and the
            numbers.
    """
    after = _After(
        live=slots.live.copy(),
        planned=slots.planned.copy(),
        num_tokens_known=slots.num_tokens_known.copy(),
        num_blocks_held=slots.num_blocks_held.copy(),
    )
    _check_releases(slots, batch, after)
    _check_swaps_out(slots, batch)
    _check_copies(slots, batch)
    _check_swaps_in(slots, batch)
    for admission in batch.admits:
        try:
            _check_admission(slots, admission, after)
        except SessionLost as error:
            raise SessionLost(error.message, metadata=in_slot(admission.slot)) from error
    _check_appends(slots, batch, after)
    _check_rows(slots, batch, after)
    _check_written_blocks(slots, batch)


def _check_releases(slots: SlotColumns, batch: Batch, after: _After) -> None:
    released = batch.release_slot
    if not len(released):
        return
    _check_range(released, 0, slots.num_slots - 1, "release_slot")
    _check_distinct(released, "release_slot")
    _check_slots(after.live[released], released, "release_slot {} is not live")
    after.live[released] = False
    after.num_blocks_held[released] = 0


def _check_copies(slots: SlotColumns, batch: Batch) -> None:
    source, destination = batch.copy_source, batch.copy_destination
    _check_group(source, copy_destination=destination)
    if not len(source):
        return
    _check_range(source, 1, slots.num_blocks, "copy_source")
    _check_range(destination, 1, slots.num_blocks, "copy_destination")
    _check_distinct(destination, "copy_destination")
    both = np.intersect1d(source, destination)
    if len(both):
        raise _inconsistent(f"block {both[0]} is both source and destination of a copy")
    _check_unheld(slots, batch, destination, "copy_destination")


def _check_swaps_out(slots: SlotColumns, batch: Batch) -> None:
    block, host = batch.swap_out_block, batch.swap_out_host
    _check_group(block, swap_out_host=host)
    if not len(block):
        return
    _check_range(block, 1, slots.num_blocks, "swap_out_block")
    _check_range(host, 1, slots.num_host_blocks, "swap_out_host")
    _check_distinct(host, "swap_out_host")


def _check_swaps_in(slots: SlotColumns, batch: Batch) -> None:
    host, block = batch.swap_in_host, batch.swap_in_block
    _check_group(host, swap_in_block=block)
    if not len(host):
        return
    _check_range(host, 1, slots.num_host_blocks, "swap_in_host")
    _check_range(block, 1, slots.num_blocks, "swap_in_block")
    _check_all(slots.is_host_written[host], host, "swap_in_host {} was never written")
    # The swap out happens first, so the swap in would not read what an earlier batch wrote.
    overwritten = np.intersect1d(host, batch.swap_out_host)
    if len(overwritten):
        raise _inconsistent(f"host block {overwritten[0]} is swapped in and out by one batch")
    _check_distinct(block, "swap_in_block")
    both = np.intersect1d(block, batch.copy_destination)
    if len(both):
        raise _inconsistent(f"block {both[0]} is the destination of a copy and of a swap")
    _check_unheld(slots, batch, block, "swap_in_block")


def _check_unheld(slots: SlotColumns, batch: Batch, block: Int32Column, what: str) -> None:
    holders = slots.num_holders[block] - _count(block, _released_blocks(slots, batch))
    _check_all(holders == 0, block, what + " {} is held by a live slot")


def _check_admission(slots: SlotColumns, admission: Admission, after: _After) -> None:
    slot, num_tokens = admission.slot, len(admission.token_ids)
    num_blocks, cached = len(admission.block_ids), admission.num_cached_tokens
    if not 0 <= slot < slots.num_slots:
        raise _inconsistent(f"admitted slot {slot} is outside 0 to {slots.num_slots - 1}")
    if after.live[slot]:
        raise _inconsistent(f"admitted slot {slot} is live")
    if not int(slots.generation[slot]) < admission.generation < 2**32:
        raise _inconsistent(
            f"slot {slot} is admitted with generation {admission.generation}, "
            f"its last one was {slots.generation[slot]}"
        )
    if num_blocks > slots.max_blocks_per_slot:
        raise _inconsistent(
            f"slot {slot} is admitted with {num_blocks} blocks, "
            f"a slot can hold {slots.max_blocks_per_slot}"
        )
    if not 1 <= num_tokens <= slots.max_blocks_per_slot * slots.block_size:
        raise _inconsistent(f"slot {slot} is admitted with {num_tokens} tokens")
    if not 1 <= admission.num_prompt_tokens <= num_tokens:
        raise _inconsistent(
            f"slot {slot} is admitted with {admission.num_prompt_tokens} prompt tokens "
            f"of {num_tokens} tokens"
        )
    if not 0 <= cached < num_tokens or cached > num_blocks * slots.block_size:
        raise _inconsistent(
            f"slot {slot} is admitted with {cached} cached tokens of {num_tokens}, "
            f"in {num_blocks} blocks"
        )
    _check_range(admission.block_ids, 1, slots.num_blocks, f"a block admitted to slot {slot}")
    after.live[slot] = True
    after.planned[slot] = cached
    after.num_tokens_known[slot] = num_tokens
    after.num_blocks_held[slot] = num_blocks


def _check_appends(slots: SlotColumns, batch: Batch, after: _After) -> None:
    slot = batch.append_slot
    _check_group(slot, append_block=batch.append_block)
    if not len(slot):
        return
    _check_range(slot, 0, slots.num_slots - 1, "append_slot")
    _check_slots(after.live[slot], slot, "append_slot {} is not live")
    _check_range(batch.append_block, 1, slots.num_blocks, "append_block")
    np.add.at(after.num_blocks_held, slot, 1)
    fits = after.num_blocks_held[slot] <= slots.max_blocks_per_slot
    _check_slots(fits, slot, f"append_slot {{}} would hold over {slots.max_blocks_per_slot} blocks")


def _check_rows(slots: SlotColumns, batch: Batch, after: _After) -> None:
    slot, start, length = batch.row_slot, batch.row_start, batch.row_num_tokens
    _check_group(slot, row_start=start, row_num_tokens=length, row_flags=batch.row_flags)
    if not len(slot):
        return
    _check_range(slot, 0, slots.num_slots - 1, "row_slot")
    _check_distinct(slot, "row_slot")
    _check_slots(after.live[slot], slot, "row_slot {} is not live")
    _check_slots(batch.row_flags <= ROW_SAMPLES, slot, "the row of slot {} has an unknown flag")
    planned, known = after.planned[slot], after.num_tokens_known[slot]
    end = start + length
    samples = batch.row_flags == ROW_SAMPLES
    capacity = after.num_blocks_held[slot] * slots.block_size
    # A start that equals the plan is small, so a length that makes the end overflow fails a rule.
    fits = (start == planned) & (length >= 1) & (end > start) & (end <= capacity) & (end <= known)
    if (fits & (~samples | (end == known))).all():
        return
    _check_slots(start == planned, slot, "the row of slot {} starts elsewhere than planned")
    _check_slots(length >= 1, slot, "the row of slot {} computes no token")
    is_short = (end > start) & (end <= capacity)
    _check_slots(is_short, slot, "the row of slot {} is longer than its blocks")
    _check_slots(end <= known, slot, "the row of slot {} computes a position without a token")
    _check_slots(
        ~samples | (end == known), slot, "the row of slot {} samples a token that is known"
    )


def _check_written_blocks(slots: SlotColumns, batch: Batch) -> None:
    """Refuse a row that would write into a block with more than one holder."""
    gained = _gained_blocks(slots, batch)
    block, writer = _written_blocks(slots, batch, gained)
    holders = slots.num_holders[block]
    if gained or len(batch.release_slot):
        taken = np.array([entry for _, fresh in gained.values() for entry in fresh], np.int32)
        holders = holders + _count(block, taken) - _count(block, _released_blocks(slots, batch))
    _check_slots(holders == 1, writer, "the row of slot {} writes into a block it shares")


def _written_blocks(
    slots: SlotColumns, batch: Batch, gained: dict[int, tuple[int, list[int]]]
) -> tuple[Int32Column, Int32Column]:
    """Return the blocks that the rows write into and the slots that do so, shape ``[W]`` each."""
    slot = batch.row_slot
    first = batch.row_start // slots.block_size
    last = (batch.row_start + batch.row_num_tokens - 1) // slots.block_size
    is_plain = first == last  # the row writes into one block, which its slot held before
    if gained:
        is_plain &= ~np.isin(slot, np.fromiter(gained, np.int32))
    written = [slots.block_table[slot[is_plain], first[is_plain]]]
    writers = [slot[is_plain]]
    for row in np.flatnonzero(~is_plain).tolist():
        writer, start, stop = int(slot[row]), int(first[row]), int(last[row]) + 1
        base, fresh = gained.get(writer, (slots.max_blocks_per_slot, []))
        written.append(slots.block_table[writer, start : min(stop, base)])
        written.append(np.array(fresh[max(start - base, 0) : max(stop - base, 0)], np.int32))
        writers.append(np.full(stop - start, writer, np.int32))
    return np.concatenate(written), np.concatenate(writers)


def _gained_blocks(slots: SlotColumns, batch: Batch) -> dict[int, tuple[int, list[int]]]:
    """Return the blocks that each slot gains, in order, with the table index of the first."""
    gained: dict[int, tuple[int, list[int]]] = {
        admission.slot: (0, admission.block_ids.tolist()) for admission in batch.admits
    }
    for slot, block in zip(batch.append_slot.tolist(), batch.append_block.tolist(), strict=True):
        _, fresh = gained.setdefault(slot, (int(slots.num_blocks_held[slot]), []))
        fresh.append(block)
    return gained


def _released_blocks(slots: SlotColumns, batch: Batch) -> Int32Column:
    held = [slots.blocks_of(slot) for slot in batch.release_slot.tolist()]
    return np.concatenate(held) if held else np.empty(0, np.int32)


def _count(wanted: Int32Column, among: Int32Column) -> NDArray[np.int64]:
    """Return the number of times that each wanted value is in `among`, shape of `wanted`."""
    ordered = np.sort(among)
    low = np.searchsorted(ordered, wanted, "left")
    return np.asarray(np.searchsorted(ordered, wanted, "right") - low, np.int64)


def _check_group(column: NDArray[Any], **others: NDArray[Any]) -> None:
    for name, other in others.items():
        if len(other) != len(column):
            raise _inconsistent(f"{name} has {len(other)} entries, its group {len(column)}")


def _check_range(values: Int32Column, low: int, high: int, what: str) -> None:
    outside = (values < low) | (values > high)
    if outside.any():
        raise _inconsistent(f"{what} {values[outside][0]} is outside {low} to {high}")


def _check_distinct(values: Int32Column, what: str) -> None:
    ordered = np.sort(values)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(repeated):
        raise _inconsistent(f"{what} {repeated[0]} stands there twice")


def _check_all(holds: NDArray[np.bool_], block: Int32Column, template: str) -> None:
    if not holds.all():
        raise _inconsistent(template.format(block[~holds][0]))


def _check_slots(holds: NDArray[np.bool_], slot: Int32Column, template: str) -> None:
    if not holds.all():
        named = int(slot[~holds][0])
        error = _inconsistent(template.format(named))
        raise SessionLost(error.message, metadata=in_slot(named))


def _inconsistent(what: str) -> SessionLost:
    return SessionLost(f"the batch does not fit the slot state: {what}")
