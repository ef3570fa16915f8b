"""Cost of admitting one long prompt."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from scheduler_svc.core.request.block_hashes import block_digests
from tandem_bench.scheduler.service import BLOCK_SIZE, BenchService

PROMPT_LEN = 2000
_MAX_TOKENS = 4
_NUM_SLOTS = 256


@dataclass(frozen=True, slots=True)
class AdmissionCosts:
    """
    Costs of one prompt, medians in microseconds of CPU.

    Attributes:
        prompt_len: Tokens of the prompt.
        hash_us: Cost of computing its block digests alone.
        given_us: Cost of submitting it with digests, planning its admission and encoding the batch.
        computed_us: The same without digests, which the core then computes.
    """

    prompt_len: int
    hash_us: float
    given_us: float
    computed_us: float


def measure_admission(num_prompts: int = 100) -> AdmissionCosts:
    """Submit prompts one at a time to an idle core; no two share a prefix."""
    blocks_each = PROMPT_LEN // BLOCK_SIZE + 2
    service = BenchService(
        num_slots=_NUM_SLOTS,
        max_model_len=PROMPT_LEN + _MAX_TOKENS,
        num_blocks=2 * blocks_each * num_prompts + _NUM_SLOTS,
        max_num_seqs=_NUM_SLOTS,
        max_total_tokens=4096,
    )
    hash_us, given_us, computed_us = [], [], []
    for _ in range(num_prompts):
        prompt = service.tokens(PROMPT_LEN)
        start_ns = time.thread_time_ns()
        block_digests(prompt, BLOCK_SIZE)
        hash_us.append((time.thread_time_ns() - start_ns) / 1e3)
        computed_us.append(_admit_one(service, with_digests=False))
        given_us.append(_admit_one(service, with_digests=True))
    return AdmissionCosts(
        prompt_len=PROMPT_LEN,
        hash_us=float(np.median(hash_us)),
        given_us=float(np.median(given_us)),
        computed_us=float(np.median(computed_us)),
    )


def _admit_one(service: BenchService, *, with_digests: bool) -> float:
    new = service.request(PROMPT_LEN, _MAX_TOKENS)
    if with_digests:
        new = replace(new, block_digests=block_digests(new.prompt, BLOCK_SIZE))
    start_ns = time.thread_time_ns()
    service.submit(new)
    submit_us = (time.thread_time_ns() - start_ns) / 1e3
    batch, cost = service.turn()
    assert batch is not None
    assert len(batch.admits) == 1
    while service.core.has_pending_work():
        service.turn()
    return submit_us + cost.cpu_us
