"""Continuous batching of transformers: `generate_batch`, which it offers for serving."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig

from tandem_bench.offline.engines.transformers_generate import load_model
from tandem_bench.offline.workload import Served, Task

_PAGE_SIZE = 256
_MAX_BATCH_TOKENS = 4096


def load(task: Task) -> BatchContestant:
    """Load the model, with pages and batch slots for all requests of the largest workload."""
    most = max(task.concurrency)
    pages_each = -(-task.sequence_len // _PAGE_SIZE)
    batching = ContinuousBatchingConfig(
        **page_size_option(_PAGE_SIZE),
        num_blocks=most * (pages_each + 1),
        max_batch_tokens=max(_MAX_BATCH_TOKENS, most),
        max_requests_per_batch=most,
        use_cuda_graph=False,
    )
    return BatchContestant(load_model(task), batching)


def page_size_option(num_tokens: int) -> dict[str, Any]:
    """Return the option for the tokens of a page, by the name that this version has for it."""
    names = {each.name for each in fields(ContinuousBatchingConfig)}
    return {"page_size" if "page_size" in names else "block_size": num_tokens}


class BatchContestant:
    """Contestant that calls `generate_batch` once for all prompts."""

    def __init__(self, model: Any, batching: ContinuousBatchingConfig) -> None:
        self._model = model
        self._batching = batching

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of token ids."""
        return int(self._model.config.vocab_size)

    def serve(self, prompts: list[list[int]], output_len: int) -> Served:
        """Serve as `Contestant.serve` says; the setup that each call does is in the time."""
        config = GenerationConfig(
            max_new_tokens=output_len, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        started_s = time.perf_counter()
        outputs = self._model.generate_batch(
            prompts,
            generation_config=config,
            continuous_batching_config=self._batching,
            record_timestamps=True,
        )
        ended_s = time.perf_counter()
        by_prompt = {tuple(output.prompt_ids): output for output in outputs.values()}
        tokens = [list(by_prompt[tuple(prompt)].generated_tokens) for prompt in prompts]
        times_s = [sorted(output.timestamps or ()) for output in outputs.values()]
        all_decode_s = max(each[0] for each in times_s)
        return Served(
            tokens=tokens,
            num_tokens=sum(map(len, tokens)),
            started_s=started_s,
            all_decode_s=all_decode_s,
            num_before=sum(time_s <= all_decode_s for each in times_s for time_s in each),
            ended_s=ended_s,
        )
