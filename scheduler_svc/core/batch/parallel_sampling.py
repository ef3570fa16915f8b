"""
Parallel sampling (n): the KV of a prompt with several completions is computed once.

The choices of a request are requests of their own that know each other (`Request.siblings`). The
first choice to be admitted computes the prompt. The others wait until all of it was sent; then they
share its full blocks, copy the partly filled block that they go on to write, and compute the
prompt's last token again to sample from it. They share with any choice that holds the whole prompt,
so none depends on the first. If no choice holds it any more, the next one admitted uses what the
prefix cache still has of it and computes the rest. Where log probabilities of the prompt are asked
for, the first live choice reports them for all.
"""

from __future__ import annotations

from array import array
from dataclasses import replace

from scheduler_svc.core.kv_cache.prefix_cache import Prefix, writer_key
from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.request.request_parts import Terms
from scheduler_svc.core.slots.slots import SlotTable


def choices_of(
    new: NewRequest, *, stop_len: int, first_number: int, num_truncated_tokens: int
) -> list[Request]:
    """Return the choices of a request that are to be produced, each with its prior outputs."""
    requests: list[Request] = []
    for choice in new.live_choices:
        prior = new.prior_outputs[choice].tolist() if new.prior_outputs else []
        own = new
        if choice:
            sampling = replace(new.sampling, choice=new.sampling.choice + choice)
            if requests:
                sampling = replace(sampling, prompt_logprobs=None)
            own = replace(new, handle=new.handle + choice, sampling=sampling)
        num_unfilled = int(new.max_tokens == 0)
        terms = Terms(
            stop_len=stop_len + num_unfilled,
            num_prior=len(prior),
            num_truncated_tokens=num_truncated_tokens,
            num_unfilled=num_unfilled,
        )
        number = first_number + len(requests)
        request = Request(new=own, number=number, terms=terms, outputs=array("i", prior))
        requests.append(request)
    return requests


def is_sibling_computing(slots: SlotTable, request: Request) -> bool:
    """Return True while another choice computes the prompt here, which is worth waiting for."""
    return any(
        slots.planned[sibling.place.slot] < sibling.prompt_len
        for sibling in request.siblings
        if sibling.place.slot is not None and slots.holds(sibling)
    )


def is_sibling_to_score(request: Request) -> bool:
    """
    Return True while another choice waits to have the prompt scored, which it computes itself, so
    that no output comes before the scores.
    """
    return any(
        sibling.needs_scores and sibling.place.slot is None and sibling is not request
        for sibling in request.siblings
    )


def find_sibling(slots: SlotTable, request: Request) -> int | None:
    """Return the slot of another choice with its whole prompt sent in earlier batches, if any."""
    for sibling in request.siblings:
        slot = sibling.place.slot
        if slot is None or not slots.holds(sibling):
            continue
        if slots.planned[slot] >= sibling.prompt_len:
            return slot
    return None


def prefix_of_sibling(slots: SlotTable, request: Request, slot: int) -> Prefix:
    """Return the prefix that a request shares with the sibling in `slot`: prompt, no outputs."""
    table = slots.blocks.of_slot(slot)
    return Prefix.of(table.copy(), request.prompt_len, request.num_known, slots.blocks.block_size)


def writers_of_sibling(slots: SlotTable, slot: int) -> frozenset[int]:
    """Return the keys of the writers of the prompt's KV in the block table of `slot`."""
    own = writer_key(slots.replica, slot, int(slots.generation[slot]))
    return slots.request_of(slot).prefix.writers | {own}
