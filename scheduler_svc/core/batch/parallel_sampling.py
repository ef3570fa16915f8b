"""
Several completions of one prompt: its KV is computed once.

The choices of a request are requests of their own that know each other (`Request.siblings`). The
first to be admitted computes the prompt; the others wait until all of it was sent and then share
its full blocks, copy the block in which they go on to write, and compute the prompt's last token
again to draw from it. Whoever holds the whole prompt will do, so nothing hangs on the first: if
nobody holds it any more, the next one admitted finds what the prefix cache holds and leads.
"""

from __future__ import annotations

from array import array
from dataclasses import replace

from scheduler_svc.core.kv_cache.prefix_cache import Prefix, writer_key
from scheduler_svc.core.request.request import NewRequest, Request
from scheduler_svc.core.slots.slots import SlotTable


def choices_of(
    new: NewRequest, *, stop_len: int, first_number: int, num_truncated_tokens: int
) -> list[Request]:
    """The choices to be produced of a request, each with what it has of outputs already."""
    requests: list[Request] = []
    for choice in new.live_choices:
        prior = new.prior_outputs[choice].tolist() if new.prior_outputs else []
        own = new
        if choice:
            sampling = replace(new.sampling, choice=new.sampling.choice + choice)
            own = replace(new, handle=new.handle + choice, sampling=sampling)
        request = Request(
            new=own,
            number=first_number + len(requests),
            stop_len=stop_len,
            outputs=array("i", prior),
            num_prior=len(prior),
            num_truncated_tokens=num_truncated_tokens,
        )
        requests.append(request)
    return requests


def is_sibling_computing(slots: SlotTable, request: Request) -> bool:
    """True while another choice computes the prompt, which is worth waiting for."""
    return any(
        sibling.slot is not None and slots.planned[sibling.slot] < sibling.prompt_len
        for sibling in request.siblings
    )


def find_sibling(slots: SlotTable, request: Request) -> int | None:
    """The slot of another choice whose whole prompt was sent in earlier batches."""
    for sibling in request.siblings:
        if sibling.slot is not None and slots.planned[sibling.slot] >= sibling.prompt_len:
            return sibling.slot
    return None


def prefix_of_sibling(slots: SlotTable, request: Request, slot: int) -> Prefix:
    """What a request shares with the sibling in `slot`: their prompt, and no output."""
    table = slots.block_table[slot, : slots.num_blocks[slot]]
    return Prefix.of(table.copy(), request.prompt_len, request.num_known, slots.block_size)


def writers_of_sibling(slots: SlotTable, slot: int) -> frozenset[int]:
    """Who computed the prompt's KV in the table of `slot`."""
    own = writer_key(slot, int(slots.generation[slot]))
    return slots.request_of(slot).kv_writers | {own}
