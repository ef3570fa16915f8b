"""Tandem's embedded engine as a contestant."""

from __future__ import annotations

import time

from tandem.engine_config import EngineConfig
from tandem_bench.offline.workload import Served, Task
from tandem_embedded.engine import InferenceEngine
from tandem_embedded.params import GenerationParams

_BLOCK_SIZE = 16


def load(task: Task) -> EmbeddedContestant:
    """Load an engine with room for all requests at once, otherwise with its defaults."""
    most = max(task.concurrency)
    blocks_each = -(-task.sequence_len // _BLOCK_SIZE)
    limits = EngineConfig(
        block_size=_BLOCK_SIZE,
        max_num_blocks=most * (blocks_each + 1),
        max_batch_size=most,
        max_num_seqs=most,
        max_model_len=max(task.sequence_len, _BLOCK_SIZE),
        max_total_tokens=max(EngineConfig().max_total_tokens, most),
        memory_threshold=1.0,
    )
    return EmbeddedContestant(
        InferenceEngine(
            limits,
            task.model,
            dtype=task.dtype,
            num_threads=task.num_threads,
            cpu_extension=task.cpu_extension,
        )
    )


class EmbeddedContestant:
    """Contestant that steps the engine until all requests have ended."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of token ids."""
        return self._engine.vocab_size

    def serve(self, prompts: list[list[int]], output_len: int) -> Served:
        """Serve as `Contestant.serve` says."""
        engine = self._engine
        params = GenerationParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
        before = engine.get_metrics().total_tokens_generated
        started_s = time.perf_counter()
        ids = [engine.submit_request(prompt, params) for prompt in prompts]
        completed, waiting = [], set(ids)
        while waiting:
            completed += engine.step()
            over = {each.request_id for each in completed}
            waiting = {each for each in waiting - over if not engine.output_tokens(each)}
        all_decode_s = time.perf_counter()
        num_before = engine.get_metrics().total_tokens_generated - before
        completed += engine.run()
        ended_s = time.perf_counter()
        failed = next((each.error for each in completed if each.error is not None), None)
        if failed is not None:
            raise failed
        output = {each.request_id: each.output_tokens for each in completed}
        return Served(
            tokens=[output[request_id] for request_id in ids],
            num_tokens=engine.get_metrics().total_tokens_generated - before,
            started_s=started_s,
            all_decode_s=all_decode_s,
            num_before=num_before,
            ended_s=ended_s,
        )
