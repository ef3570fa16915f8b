"""Static batching of transformers: `generate` on one batch, without paging."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

from tandem_bench.offline.workload import Served, Task


def load(task: Task) -> GenerateContestant:
    """Load the model with the attention of `load_model`."""
    return GenerateContestant(load_model(task))


def load_model(task: Task) -> Any:
    """Load the task's model in its number type with SDPA attention, and set its threads."""
    torch.set_num_threads(task.num_threads)
    model = AutoModelForCausalLM.from_pretrained(
        task.model, dtype=getattr(torch, task.dtype), attn_implementation="sdpa"
    )
    return model.eval()


class _Clock(StoppingCriteria):
    """Stopping criterion that never stops and records the time of each token."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(
        self,
        input_ids: torch.Tensor,
        scores: torch.Tensor,  # noqa: ARG002  # the framework passes it
        **kwargs: object,  # noqa: ARG002
    ) -> torch.Tensor:
        self.times_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class GenerateContestant:
    """Contestant that calls `generate` once for all prompts."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of token ids."""
        return int(self._model.config.vocab_size)

    def serve(self, prompts: list[list[int]], output_len: int) -> Served:
        """Serve as `Contestant.serve` says."""
        clock = _Clock()
        config = GenerationConfig(
            max_new_tokens=output_len,
            min_new_tokens=output_len,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        input_ids = torch.tensor(prompts)
        started_s = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        tokens = output[:, input_ids.shape[1] :].tolist()
        return Served(
            tokens=tokens,
            num_tokens=sum(map(len, tokens)),
            started_s=started_s,
            all_decode_s=clock.times_s[0],
            num_before=len(prompts),
            ended_s=clock.times_s[-1],
        )
