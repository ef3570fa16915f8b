"""Serve the workload with the embedded engine in this process; prints tokens per second as JSON."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

from tandem.engine_config import EngineConfig
from tandem_embedded import GenerationParams, InferenceEngine
from tests.bench.serving.workload import Workload


def run(engine: InferenceEngine, params: GenerationParams, workload: Workload) -> int:
    """Serve all requests, `concurrency` of them at once; return the tokens produced."""
    waiting = workload.prompts(engine.vocab_size)
    produced = live = 0
    while waiting or live:
        while waiting and live < workload.concurrency:
            engine.submit_request(waiting.pop(0), params)
            live += 1
        finished = engine.step()
        live -= len(finished)
        produced += sum(request.generated_tokens for request in finished)
    return produced


def main() -> None:
    """Load, warm up on as many other requests, then time all, `concurrency` of them at once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--workload", type=json.loads, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    workload = Workload(**arguments.workload)
    config = EngineConfig(max_batch_size=workload.concurrency, max_num_seqs=workload.num_requests)
    engine = InferenceEngine(config, arguments.model, dtype=arguments.dtype, num_threads=1)
    params = GenerationParams(max_tokens=workload.output_len, temperature=0.0, ignore_eos=True)
    run(engine, params, replace(workload, seed=workload.seed + 1))
    start = time.perf_counter()
    produced = run(engine, params, workload)
    elapsed_s = time.perf_counter() - start
    if produced != workload.output_tokens:
        raise SystemExit(f"the engine produced {produced} of {workload.output_tokens} tokens")
    print(json.dumps({"output_tokens": produced, "output_tokens_per_s": produced / elapsed_s}))


if __name__ == "__main__":
    main()
