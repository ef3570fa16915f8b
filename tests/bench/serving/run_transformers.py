"""Serve the workload with transformers' continuous batching in this process; prints tokens per second as JSON."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from tandem_bench.offline.engines.transformers_batch import page_size_option
from tests.bench.serving.workload import Workload


def main() -> None:
    """Load, warm up on two requests, then time all of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--workload", type=json.loads, required=True)
    parser.add_argument("--page-size", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    workload = Workload(**arguments.workload)
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=getattr(torch, arguments.dtype), attn_implementation="sdpa"
    ).eval()
    prompts = workload.prompts(model.config.vocab_size)
    generation = GenerationConfig(
        max_new_tokens=workload.output_len, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    pages = workload.concurrency * -(
        -(workload.input_len + workload.output_len) // arguments.page_size
    )
    batching = ContinuousBatchingConfig(
        **page_size_option(arguments.page_size),
        num_blocks=pages + workload.concurrency,
        max_batch_tokens=4096,
        max_requests_per_batch=workload.concurrency,
        use_cuda_graph=False,
    )
    options = {"generation_config": generation, "continuous_batching_config": batching}
    model.generate_batch(prompts[:2], **options)
    start = time.perf_counter()
    outputs = model.generate_batch(prompts, **options)
    elapsed_s = time.perf_counter() - start
    produced = sum(len(output.generated_tokens) for output in outputs.values())
    if produced != workload.output_tokens:
        raise SystemExit(f"transformers produced {produced} of {workload.output_tokens} tokens")
    print(json.dumps({"output_tokens": produced, "output_tokens_per_s": produced / elapsed_s}))


if __name__ == "__main__":
    main()
