"""
Chunked prefill: the number of tokens of each prompt that a step computes.

    started prompts, oldest first       as many tokens as the step has left
    new ones (`prefill_admission`)      likewise
    without `chunked_prefill`           new ones only if the step has room for all their tokens
    with `long_prefill_threshold` T     short prompts first; all those with over T tokens left share
                                        T tokens, at most half of what the step has for prompts,
                                        and get what is left over in the end

Only the last chunk of a prompt samples, if output is asked for. Last chunks of one token are
avoided: a chunk that would leave exactly one token is one shorter. A chunk that would be a single
token and not the last one is left to a later step if another prompt took the rest of this one; it
is computed where one token is all that the step has for prompts, since a later step may have no
more.

Sources: chunking as in Sarathi-Serve (arXiv:2403.02310); last chunks of at least two tokens as in
Megatron Core. We go on with many prompts at once, as vLLM does. Its long_prefill_token_threshold
caps each long prompt's chunk; ours caps all of them together, so that many long ones cannot keep a
short one out, and they get the tokens that no other prompt needs.
"""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.batch.batch_builder import BatchBuilder
from scheduler_svc.core.request.request import RequestState


def continue_prefills(builder: BatchBuilder) -> None:
    """Go on with prompts begun in earlier steps, oldest request first, short before long ones."""
    replica, slots = builder.replica, builder.replica.slots
    threshold = replica.cell.options.long_prefill_threshold
    if threshold is not None:
        builder.limit_long_prompts(threshold)
    if slots.num_running - len(replica.paused) == slots.num_decoding:
        return
    started = (slots.running & ~slots.decoding).nonzero()[0]
    if replica.paused:
        started = started[~np.isin(started, list(replica.paused))]
    order = np.argsort(slots.admitted.number[started])
    if threshold is not None:
        is_long = (slots.admitted.known_len - slots.planned)[started] > threshold
        order = np.lexsort((slots.admitted.number[started], is_long))
    for slot in started[order].tolist():
        if not builder.budget:
            return
        add_chunk(builder, slot)


def add_chunk(builder: BatchBuilder, slot: int) -> None:
    """
    Add a row for as many of a slot's tokens as the step has room for, if any; its blocks were taken
    at admission.
    """
    slots = builder.replica.slots
    left = int(slots.admitted.known_len[slot] - slots.planned[slot])
    chunk = next_chunk(builder, left)
    if not chunk:
        return
    samples = chunk == left and slots.request_of(slot).produces
    builder.add_prefill(slot, chunk, samples=samples, is_long=_is_long(builder, left))
    if samples:
        _start_decoding(builder, slot)


def next_chunk(builder: BatchBuilder, left: int) -> int:
    """Return the tokens the step has for a prompt with `left` tokens to compute; 0: it waits."""
    room = min(builder.budget, builder.replica.cell.options.chunked_prefill_size or left)
    if _is_long(builder, left):
        room = min(room, builder.long_room)
    return _chunk_len(left, room, may_be_single=not builder.prefills)


def may_cut(builder: BatchBuilder) -> bool:
    """Return True where prompts may be cut into chunks; always while `step_room` limits tokens."""
    return (
        builder.replica.cell.options.chunked_prefill or builder.replica.room.max_tokens is not None
    )


def _is_long(builder: BatchBuilder, left: int) -> bool:
    """Return True for a prompt with more than `long_prefill_threshold` tokens left."""
    threshold = builder.replica.cell.options.long_prefill_threshold
    return threshold is not None and left > threshold


def use_leftover(builder: BatchBuilder) -> None:
    """Give long prompts the tokens that no other prompt took, oldest request first."""
    cell = builder.replica.cell
    if cell.options.long_prefill_threshold is None:
        return
    slots, cap = builder.replica.slots, cell.options.chunked_prefill_size
    for index, (slot, chunk, flags) in enumerate(builder.prefills):
        left = int(slots.admitted.known_len[slot] - slots.planned[slot])
        if not builder.budget or flags or not _is_long(builder, left):
            continue
        longer = _chunk_len(left, min(chunk + builder.budget, cap or left), may_be_single=True)
        if longer <= chunk:
            continue
        samples = longer == left and slots.request_of(slot).produces
        builder.lengthen_prefill(index, longer, samples=samples)
        if samples:
            _start_decoding(builder, slot)


def _chunk_len(left: int, room: int, *, may_be_single: bool) -> int:
    if left <= room:
        return left
    chunk = room - 1 if left - room == 1 and room > 1 else room
    return 0 if chunk == 1 and not may_be_single else chunk


def _start_decoding(builder: BatchBuilder, slot: int) -> None:
    builder.replica.slots.set_decoding(slot, True)
    builder.replica.slots.request_of(slot).move(RequestState.DECODE)
