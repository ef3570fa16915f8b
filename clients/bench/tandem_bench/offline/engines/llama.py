"""llama.cpp through the bindings of llama-cpp-python: one context, a sequence per request."""

from __future__ import annotations

import ctypes
import sys
import tempfile
import time
from pathlib import Path

import llama_cpp
import numpy as np

from tandem_bench.offline.gguf_file import write_gguf
from tandem_bench.offline.workload import Served, Task

_KV_TYPES = {"float32": 0, "bfloat16": 30}
"""ggml's numbers of the types of keys and values, which are those of the weights."""
_LOG_LEVEL_ERROR = 4


def load(task: Task) -> LlamaContestant:
    """Load the model in the task's number type, from a GGUF file in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(task.model, task.dtype, path)
        return LlamaContestant(path, task)


def _log(level: int, text: bytes, _user: int | None) -> None:
    """Pass on errors only; the library logs a lot to stderr."""
    if level == _LOG_LEVEL_ERROR:
        sys.stderr.write(text.decode(errors="replace"))


_LOG_CALLBACK = llama_cpp.llama_log_callback(_log)
"""Callback that is kept for as long as the library may call it."""


class LlamaContestant:
    """
    Contestant that decodes all prompts in one call, then a token of each request per call.

    Tokens are greedy; numpy finds the largest logit.
    """

    def __init__(self, path: Path, task: Task) -> None:
        llama_cpp.llama_log_set(_LOG_CALLBACK, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        # The file is deleted after loading; mapped pages would be read during the measurement.
        model_params.use_mmap = False
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        if self._model is None:
            raise RuntimeError(f"llama.cpp did not load {path}")
        most = max(task.concurrency)
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = most
        params.n_ctx = most * task.sequence_len
        params.n_batch = most * task.input_len
        params.n_threads = params.n_threads_batch = task.num_threads
        params.type_k = params.type_v = _KV_TYPES[task.dtype]
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if self._context is None:
            raise RuntimeError(f"llama.cpp made no context for {most} sequences")
        self._vocab_size = int(
            llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        )
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of token ids."""
        return self._vocab_size

    def serve(self, prompts: list[list[int]], output_len: int) -> Served:
        """Serve as `Contestant.serve` says."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        num_rows, input_len = len(prompts), len(prompts[0])
        started_s = time.perf_counter()
        for sequence, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                self._put(sequence * input_len + position, token, position, sequence)
                self._batch.logits[sequence * input_len + position] = position == input_len - 1
        last_places = [(row + 1) * input_len - 1 for row in range(num_rows)]
        latest = self._decode(last_places, num_rows * input_len)
        tokens = [[token] for token in latest]
        all_decode_s = time.perf_counter()
        for step in range(output_len - 1):
            for row, token in enumerate(latest):
                self._put(row, token, input_len + step, row)
                self._batch.logits[row] = True
            latest = self._decode(list(range(num_rows)), num_rows)
            for output, token in zip(tokens, latest, strict=True):
                output.append(token)
        return Served(
            tokens=tokens,
            num_tokens=num_rows * output_len,
            started_s=started_s,
            all_decode_s=all_decode_s,
            num_before=num_rows,
            ended_s=time.perf_counter(),
        )

    def _put(self, place: int, token: int, position: int, sequence: int) -> None:
        batch = self._batch
        batch.token[place], batch.pos[place] = token, position
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence

    def _decode(self, places: list[int], num_tokens: int) -> list[int]:
        """Compute the batch; return the likeliest token after each of these places."""
        self._batch.n_tokens = num_tokens
        outcome = llama_cpp.llama_decode(self._context, self._batch)
        if outcome:
            raise RuntimeError(f"llama_decode of {num_tokens} tokens ended with {outcome}")
        chosen = []
        for place in places:
            logits = llama_cpp.llama_get_logits_ith(self._context, place)
            row = np.ctypeslib.as_array(logits, (self._vocab_size,))
            chosen.append(int(row.argmax()))
        return chosen
