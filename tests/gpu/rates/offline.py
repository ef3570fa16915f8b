"""
`python -m tests.gpu.rates.offline`: 256 requests at once through the embedded engine and through transformers' continuous
batching, with the same random weights, on one device. Prints a JSON list.

The first row is the least time of the same requests at the bandwidth and the matrix rate that the device has in this run
(`offline_floor`), of which the others tell their share: that of a schedule that computes prompts apart from decodes. One that mixes
them could overlap products with reads; `overlapped_tokens_per_s` is the most of such a one.

Each engine's process says when its timed part begins. One that does not finish in time has a rate below all tokens over the time since
then, and is reported so; one whose timed part never began has no rate.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tandem.engine_config import EngineConfig
from tandem.process.printing_commands import end_by_signals
from tandem_bench.device.ceilings import measure_ceilings
from tandem_bench.device.json_rows import JsonRows
from tandem_bench.device.offline_floor import offline_floor
from tandem_bench.device.shapes import SHAPES
from tandem_bench.device.sizes import MODEL_SIZES
from tandem_bench.device.timing import timer_of
from tandem_bench.offline.checkpoints import random_model
from tandem_embedded import GenerationParams, InferenceEngine
from tests.gpu.rates.workload import OfflineRequests

CEILING = "ceiling"
"""Name of the row of the least time."""
ENGINES = (CEILING, "tandem", "transformers")
TEMPERATURE = 0.6
_BLOCK_SIZE = 16
_PAGE_SIZE = 256
_LARGE = "llama-1b"
_BEGUN = "begun "
_WARMING_TOKENS = 4
_CEILING_S = 0.5
"""Seconds for each of bandwidth and matrix rate."""


def main() -> int:
    """Measure both, or be the process of one."""
    given = _parser().parse_args()
    if given.engine is not None:
        answer = _ceiling(given) if given.engine == CEILING else _serve(given)
        sys.stdout.write(json.dumps(answer) + "\n")
        return 0
    model = write_model(given.models, tiny=given.tiny)
    if given.only_write:
        return 0
    found: dict[str, float] = {}
    with JsonRows() as rows:
        for engine in ENGINES:
            row = _in_own_process(engine, model, given)
            if row is None:
                continue
            rate = row["output_tokens_per_s"]
            if rate is not None:
                found[engine] = rate
            if engine != CEILING and row["finished"] and CEILING in found:
                row["share_of_ceiling"] = rate / found[CEILING]
            rows.add(row)
    return 0 if len(found) == len(ENGINES) else 1


def _in_own_process(engine: str, model: Path, given: argparse.Namespace) -> dict[str, Any] | None:
    """
    Return what an engine did; None where it failed, with the reason in its own words on stderr.
    """
    flags = ["--engine", engine, "--model", str(model), "--device", given.device]
    command = [sys.executable, "-m", "tests.gpu.rates.offline", *flags, *["--tiny"] * given.tiny]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=given.limit_s, check=False
        )
    except subprocess.TimeoutExpired as late:
        begun_s = _begun_s(late.stdout or b"")
        timed_s = None if begun_s is None else time.monotonic() - begun_s
        num_tokens = _requests(tiny=given.tiny).num_output_tokens
        return {
            "engine": engine,
            "finished": False,
            "output_tokens_per_s": None if timed_s is None else num_tokens / timed_s,
        }
    if done.returncode:
        sys.stderr.write(f"{engine} ended with {done.returncode}\n")
        return None
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def _say_begun() -> None:
    """Tell that the timed part begins, by CLOCK_MONOTONIC, which all processes share."""
    sys.stdout.write(f"{_BEGUN}{time.monotonic()}\n")
    sys.stdout.flush()


def _begun_s(printed: bytes) -> float | None:
    """Return when the timed part of a process began; None if it did not say so."""
    lines = printed.decode(errors="replace").splitlines()
    return next(
        (float(line.removeprefix(_BEGUN)) for line in lines if line.startswith(_BEGUN)), None
    )


def _warming(requests: OfflineRequests) -> OfflineRequests:
    """
    Return as many requests of a few tokens each, so that what an engine makes when it first meets
    so many is there before the timed part. Prompts are reversed: no prefix of theirs is found again.
    """
    return replace(
        requests,
        prompts=[prompt[::-1] for prompt in requests.prompts],
        output_len=[min(_WARMING_TOKENS, each) for each in requests.output_len],
    )


def _ceiling(given: argparse.Namespace) -> dict[str, Any]:
    """Measure what the device can do, and return what would follow from that alone."""
    device, requests = torch.device(given.device), _requests(tiny=given.tiny)
    rates = measure_ceilings(device, torch.bfloat16, timer_of(device), _CEILING_S)
    floor = offline_floor(
        SHAPES[_name(tiny=given.tiny)],
        torch.bfloat16.itemsize,
        rates,
        [len(prompt) for prompt in requests.prompts],
        requests.output_len,
    )
    return {
        "engine": CEILING,
        "output_tokens_per_s": floor.tokens_per_s,
        "bytes_per_s": rates.bytes_per_s,
        "flop_per_s": rates.flop_per_s,
        "prompts_s": floor.prompts_s,
        "weights_s": floor.weights_s,
        "kv_s": floor.kv_s,
        "seconds": floor.total_s,
        "overlapped_tokens_per_s": floor.num_tokens / floor.overlapped_s,
    }


def _serve(given: argparse.Namespace) -> dict[str, Any]:
    serve = _serve_tandem if given.engine == "tandem" else _serve_transformers
    requests = _requests(tiny=given.tiny)
    num_tokens, seconds = serve(given.model, given.device, requests)
    if num_tokens != requests.num_output_tokens:
        sys.exit(f"{given.engine} made {num_tokens} of {requests.num_output_tokens} tokens")
    return {
        "engine": given.engine,
        "finished": True,
        "output_tokens_per_s": num_tokens / seconds,
        "requests": len(requests.prompts),
        "output_tokens": num_tokens,
        "seconds": seconds,
    }


def _serve_tandem(model: Path, device: str, requests: OfflineRequests) -> tuple[int, float]:
    num_requests = len(requests.prompts)
    longest = -(-requests.longest // _BLOCK_SIZE) * _BLOCK_SIZE
    limits = EngineConfig(
        block_size=_BLOCK_SIZE,
        max_num_blocks=num_requests * (longest // _BLOCK_SIZE + 1),
        max_batch_size=num_requests,
        max_num_seqs=num_requests,
        max_model_len=longest,
        max_total_tokens=max(16384, num_requests),
        memory_threshold=1.0,
    )
    engine = InferenceEngine(limits, model, dtype="bfloat16", device=device, window=2)

    def serve(asked: OfflineRequests) -> int:
        for prompt, output_len in zip(asked.prompts, asked.output_len, strict=True):
            params = GenerationParams(
                max_tokens=output_len,
                temperature=TEMPERATURE,
                top_k=0,
                top_p=1.0,
                ignore_eos=True,
                seed=0,
            )
            engine.submit_request(prompt, params)
        return sum(each.generated_tokens for each in engine.run())

    return _timed(serve, requests)


def _serve_transformers(model: Path, device: str, requests: OfflineRequests) -> tuple[int, float]:
    from transformers import (  # noqa: PLC0415  # takes seconds
        AutoModelForCausalLM,
        ContinuousBatchingConfig,
        GenerationConfig,
    )

    from tandem_bench.offline.engines.transformers_batch import (  # noqa: PLC0415  # likewise
        page_size_option,
    )

    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    loaded = loaded.to(device).eval()
    num_requests = len(requests.prompts)
    batching = ContinuousBatchingConfig(
        **page_size_option(_PAGE_SIZE),
        num_blocks=num_requests * (-(-requests.longest // _PAGE_SIZE) + 1),
        max_batch_tokens=max(8192, num_requests),
        max_requests_per_batch=num_requests,
        use_cuda_graph=torch.device(device).type == "cuda",
    )
    sampling = {
        "do_sample": True,
        "temperature": TEMPERATURE,
        "top_k": 0,
        "top_p": 1.0,
        "eos_token_id": -1,
        "pad_token_id": 0,
    }

    manager = loaded.init_continuous_batching(
        generation_config=GenerationConfig(max_new_tokens=max(requests.output_len), **sampling),
        continuous_batching_config=batching,
    )

    def serve(asked: OfflineRequests) -> int:
        for prompt, length in zip(asked.prompts, asked.output_len, strict=True):
            manager.add_request(prompt, max_new_tokens=length)
        found = 0
        for _ in asked.prompts:
            while (result := manager.get_result(timeout=1)) is None:
                if not manager.is_running():
                    raise RuntimeError("transformers' batching ended before its requests")
            found += len(result.generated_tokens)
        return found

    manager.start()
    try:
        return _timed(serve, requests)
    finally:
        manager.stop(block=True)


def _timed(serve: Callable[[OfflineRequests], int], requests: OfflineRequests) -> tuple[int, float]:
    """Warm an engine up, have it serve all requests, and return its tokens and seconds."""
    serve(_warming(requests))
    _say_begun()
    started_s = time.perf_counter()
    num_tokens = serve(requests)
    return num_tokens, time.perf_counter() - started_s


def _requests(*, tiny: bool) -> OfflineRequests:
    if tiny:
        return OfflineRequests.draw(4, 4, 12, 256)
    return OfflineRequests.draw(256, 100, 1024, MODEL_SIZES[_LARGE].vocab_size)


def write_model(folder: Path | None, *, tiny: bool) -> Path:
    """A model directory with random weights, kept in a folder or else in the user's cache."""
    name = _name(tiny=tiny)
    return random_model(name, MODEL_SIZES[name], folder)


def _name(*, tiny: bool) -> str:
    return "tiny" if tiny else _LARGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a few requests of a small model")
    parser.add_argument("--limit-s", type=float, default=60.0, help="for each engine")
    parser.add_argument("--engine", choices=ENGINES, help="only this one, in this process")
    parser.add_argument("--model", type=Path, help="its weights")
    parser.add_argument("--only-write", action="store_true", help="write the weights and end")
    parser.add_argument("--models", type=Path, help="where random weights are kept")
    return parser


if __name__ == "__main__":
    end_by_signals()  # so that what it started is ended too
    sys.exit(main())
