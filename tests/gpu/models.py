"""Runners of small models with random weights on any device, and what they are given to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from executor_svc.memory.kv_memory import KvMemory
from executor_svc.model.config import ModelConfig
from executor_svc.step.graphs.capture import GraphDevice
from executor_svc.step.graphs.plan import GraphPlan
from executor_svc.step.graphs.shapes import GraphShape
from executor_svc.step.runner import ModelRunner
from tandem.link.batch import Batch
from tandem.sampling_params import SamplingParams
from tandem_bench.device.shapes import SHAPES
from tandem_bench.model.random_model import random_model
from tests.executor_svc.stepping import Row, admission, batch, random_tokens

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0)
NOISY = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=5)
FILTERED = SamplingParams(temperature=0.9, top_k=30, top_p=0.9, seed=2**64 - 1, min_p=0.02)
EDITED = SamplingParams(
    temperature=0.8,
    top_k=0,
    top_p=0.95,
    seed=11,
    repetition_penalty=1.3,
    frequency_penalty=0.2,
    presence_penalty=-0.1,
    logit_bias=((3, 2.0), (5, -1.0)),
    min_tokens=4,
    end_ids=(7,),
)
TOLD = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=7, logprobs=3)


def small_model(device: torch.device) -> ModelConfig:
    """A decoder with normalised heads; on a GPU with heads and widths that models have."""
    if device.type == "cuda":
        return replace(SHAPES["qwen3-0.6b"], num_layers=3, windows=(None, 100, None))
    return replace(SHAPES["tiny"], windows=(None, 24), qk_norm=True)


def make_runner(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    num_slots: int,
    max_model_len: int,
    graphs: GraphDevice | None = None,
    sizes: Sequence[int] = (),
    mixed: Sequence[GraphShape] = (),
    num_host_blocks: int = 0,
    **options: object,
) -> ModelRunner:
    """
    Return a warm runner over a cache of NaN; with `graphs` it captures steps of these sizes.
    """
    blocks = num_slots * -(-max_model_len // BLOCK_SIZE)
    model = random_model(config, dtype, device)
    kv = KvMemory(config, blocks, BLOCK_SIZE, dtype, device, num_host_blocks=num_host_blocks)
    for layer in kv.layers:
        layer[1:].fill_(float("nan"))
    plan = None
    if graphs is not None:
        plan = GraphPlan(device=graphs, sizes=tuple(sizes), mixed=tuple(mixed))
    runner = ModelRunner(
        model,
        kv,
        num_slots=num_slots,
        max_model_len=max_model_len,
        boot_id="gpu-tests",
        static_rows=0 if graphs is None else num_slots,
        graph_plan=plan,
        **options,
    )
    runner.warm_up()
    return runner


def prompts(
    lengths: Sequence[int],
    samplings: Sequence[SamplingParams],
    max_model_len: int,
    vocab_size: int,
) -> Batch:
    """
    Return a batch that computes a prompt for each slot, with all blocks that it will ever need.
    """
    per_slot = -(-max_model_len // BLOCK_SIZE)
    admits = [
        admission(
            slot,
            random_tokens(length, slot, vocab_size),
            range(1 + slot * per_slot, 1 + (slot + 1) * per_slot),
            sampling=samplings[slot % len(samplings)],
        )
        for slot, length in enumerate(lengths)
    ]
    rows = [Row(slot, 0, length) for slot, length in enumerate(lengths)]
    return batch(*rows, admits=admits)


def decodes(lengths: Sequence[int], counts: Sequence[int]) -> Iterator[Batch]:
    """Yield for each count a batch in which so many slots, the first ones, go on by a token."""
    length = list(lengths)
    for count in counts:
        yield batch(*(Row(slot, length[slot]) for slot in range(count)))
        for slot in range(count):
            length[slot] += 1
