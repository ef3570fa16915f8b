"""
`python -m tandem_bench.offline.engine_process TASK`: measure one engine.

It loads the engine, serves each workload of the task, and prints a line of JSON for each. All other
output, that of libraries too, goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys

from tandem.errors import TandemError
from tandem_bench.offline.engines import ENGINES
from tandem_bench.offline.workload import Contestant, Served, Task

_TOKENS_TOLD = 64


def main(argument: str) -> None:
    """Measure the task that the argument describes."""
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    task = Task.from_json(argument)
    engine = ENGINES[task.engine].load(task)
    for concurrency in task.concurrency:
        served = measure(engine, task, concurrency)
        results.write(json.dumps(_described(concurrency, served)) + "\n")


def measure(engine: Contestant, task: Task, concurrency: int) -> Served:
    """
    Serve a workload after a small one like it, which warms the engine up.

    Raises:
        RuntimeError: The engine made more or fewer tokens than asked.
    """
    warm_up, workload = task.warm_up(concurrency), task.workload(concurrency)
    engine.serve(warm_up.prompts(engine.vocab_size), warm_up.output_len)
    served = engine.serve(workload.prompts(engine.vocab_size), workload.output_len)
    wanted = concurrency * workload.output_len
    if served.num_tokens != wanted:
        raise RuntimeError(f"{task.engine} made {served.num_tokens} tokens instead of {wanted}")
    return served


def _described(concurrency: int, served: Served) -> dict[str, object]:
    return {
        "concurrency": concurrency,
        "output_tokens_per_s": served.output_tokens_per_s,
        "decode_tokens_per_s": served.decode_tokens_per_s,
        "prompts_s": served.all_decode_s - served.started_s,
        "whole_s": served.ended_s - served.started_s,
        "tokens": [list(tokens[:_TOKENS_TOLD]) for tokens in served.tokens[:1]],
    }


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except TandemError as refused:
        sys.exit(refused.message)
