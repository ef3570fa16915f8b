"""Batches in few words, and a scheduler that only hands out blocks, for tests of the runner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from executor_svc.memory.kv_memory import KvMemory
from executor_svc.model.loader import load_model
from executor_svc.parallel.process_groups import SINGLE, ProcessGroups
from executor_svc.step.runner import ModelRunner
from tandem.link.batch import ROW_SAMPLES, Admission, Batch
from tandem.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0)


def int32(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), np.int32)


def admission(
    slot: int,
    token_ids: Sequence[int],
    block_ids: Sequence[int],
    *,
    generation: int = 1,
    num_cached_tokens: int = 0,
    sampling: SamplingParams = GREEDY,
) -> Admission:
    return Admission(
        slot=slot,
        generation=generation,
        token_ids=int32(token_ids),
        num_prompt_tokens=len(token_ids),
        num_cached_tokens=num_cached_tokens,
        block_ids=int32(block_ids),
        sampling=sampling,
    )


@dataclass
class Row:
    """Compute `num_tokens` of `slot` from position `start`; `samples` the token after them."""

    slot: int
    start: int
    num_tokens: int = 1
    samples: bool = True


def batch(
    *rows: Row,
    admits: Sequence[Admission] = (),
    appends: Sequence[tuple[int, int]] = (),
    releases: Sequence[int] = (),
    copies: Sequence[tuple[int, int]] = (),
    swaps_out: Sequence[tuple[int, int]] = (),
    swaps_in: Sequence[tuple[int, int]] = (),
) -> Batch:
    """`swaps_out` from device to host block, `swaps_in` from host to device block."""
    return Batch(
        admits=tuple(admits),
        row_slot=int32(row.slot for row in rows),
        row_num_tokens=int32(row.num_tokens for row in rows),
        row_start=int32(row.start for row in rows),
        row_flags=np.array([ROW_SAMPLES if row.samples else 0 for row in rows], np.uint8),
        append_slot=int32(slot for slot, _ in appends),
        append_block=int32(block for _, block in appends),
        release_slot=int32(releases),
        copy_source=int32(source for source, _ in copies),
        copy_destination=int32(destination for _, destination in copies),
        swap_out_block=int32(block for block, _ in swaps_out),
        swap_out_host=int32(host for _, host in swaps_out),
        swap_in_host=int32(host for host, _ in swaps_in),
        swap_in_block=int32(block for _, block in swaps_in),
    )


def forward_logits(runner: ModelRunner, plan: Batch) -> torch.Tensor:
    """
    Apply one batch and give float32 logits of every computed token, ``[T, vocab_size]`` or a rank's
    share of them, instead of sampling; rows that sample advance as if they had, without a token.
    """
    runner._apply(plan)
    with torch.inference_mode():
        return runner._decoder.project(runner._forward(plan)[1]).float()


@dataclass
class Bench:
    """
    A model under test with its KV memory full of NaN, so that any read past a sequence's end shows.
    """

    runner: ModelRunner
    kv: KvMemory
    block_ids: list[int] = field(default_factory=list)

    @classmethod
    def build(
        cls,
        directory: Path,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        block_size: int = 16,
        num_blocks: int = 256,
        num_slots: int = 8,
        max_model_len: int = 256,
        num_host_blocks: int = 0,
        keeps_addresses: bool = False,
        shuffle_seed: int | None = None,
        packs: bool = False,
        groups: ProcessGroups = SINGLE,
        **options: object,
    ) -> Bench:
        model = load_model(directory, dtype=dtype, device=device, packs=packs, groups=groups)
        kv = KvMemory(
            model.rank_config,
            num_blocks,
            block_size,
            model.dtype,
            model.device,
            num_host_blocks=num_host_blocks,
            keeps_addresses=keeps_addresses,
        )
        for layer in kv.layers:
            layer.fill_(float("nan"))
        runner = ModelRunner(
            model,
            kv,
            num_slots=num_slots,
            max_model_len=max_model_len,
            boot_id="boot-1",
            **options,
        )
        block_ids = list(range(1, num_blocks + 1))
        if shuffle_seed is not None:
            np.random.default_rng(shuffle_seed).shuffle(block_ids)
        return cls(runner, kv, block_ids)

    def take_blocks(self, num_tokens: int) -> list[int]:
        """Take blocks for so many tokens from the front of the free list."""
        num_blocks = -(-num_tokens // self.kv.block_size)
        taken, self.block_ids = self.block_ids[:num_blocks], self.block_ids[num_blocks:]
        return taken

    def admit(self, slot: int, token_ids: Sequence[int], **options: object) -> Admission:
        """Admit a sequence with blocks for all its tokens and one more."""
        return admission(slot, token_ids, self.take_blocks(len(token_ids) + 1), **options)


def random_tokens(num_tokens: int, seed: int, vocab_size: int = 256) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, num_tokens).tolist()


def hugging_face_logits(directory: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """Return float32 logits of every position, computed by transformers, ``[T, vocab_size]``."""
    import transformers  # noqa: PLC0415  # takes seconds to import

    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        return model(torch.tensor([list(token_ids)])).logits[0]
