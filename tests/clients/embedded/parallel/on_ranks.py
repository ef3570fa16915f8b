"""Work of one rank of an engine that several processes share."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

from executor_svc.parallel.process_groups import ProcessGroups
from tandem.engine_config import EngineConfig
from tandem_embedded import (
    CoreOptions,
    EngineError,
    GenerationParams,
    InferenceEngine,
    PreemptionMode,
)
from tests.clients.embedded.parallel.fleet import (
    PROMPTS,
    SEEDED,
    Answer,
    answer_of,
    answers,
    build,
    by_id,
)


def served(groups: ProcessGroups | None, directory: Path, **settings) -> list[Answer]:
    """Return the answers to all kinds of requests."""
    return answers(build(directory, pg_collection=groups, **settings))


def counts(groups: ProcessGroups, directory: Path) -> tuple[int, ...]:
    """Return what a rank tells of its engine: of limits it makes itself, steps and memory."""
    engine = InferenceEngine(
        None, directory, dtype="float32", pg_collection=groups, tp_size=groups.tensor_size
    )
    engine.complete(PROMPTS[0], SEEDED)
    stats = engine.get_memory_stats()
    return engine.get_metrics().steps, stats.total_blocks, engine.config.max_model_len


def journey(groups: ProcessGroups | None, directory: Path, mode: str) -> list[Answer]:
    """
    Return the answers to requests of which some are preempted, swapped or aborted, around a
    suspension, while the ranks' clocks and speeds differ.
    """
    rank = 0 if groups is None else groups.tensor_rank
    config = EngineConfig(
        block_size=8, max_num_blocks=24, max_batch_size=4, max_model_len=128, max_total_tokens=64
    )
    engine = build(
        directory,
        config=config,
        pg_collection=groups,
        kv_cache_management_mode=mode,
        swap_space_gb=0.0005,
        options=CoreOptions(
            schedule_conservativeness=0.0, preemption_mode=PreemptionMode.SWAP, ageing_s=0.5
        ),
        clock=lambda: time.monotonic() * (1 + rank) + 1000 * rank,
    )
    for prompt in PROMPTS:
        engine.submit_request(prompt, SEEDED)
    aborted = engine.submit_request(PROMPTS[0], SEEDED)
    for step in range(8):
        time.sleep(0.01 * ((step + rank) % 2))
        engine.step()
    engine.preempt(0)
    engine.abort(aborted)
    engine.suspend()
    engine.resume()
    found = by_id(engine.run())
    engine.check_integrity()
    return [answer_of(request) for request in found if request.request_id != aborted]


def unseeded(groups: ProcessGroups, directory: Path) -> tuple[list[int], list[int], str]:
    """Return the seeds and tokens of requests without a seed, and the text of a stream."""
    engine = build(directory, pg_collection=groups)
    params = GenerationParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    first, second = (engine.complete(PROMPTS[0], params) for _ in range(2))
    text = "".join(piece.text for piece in engine.stream(PROMPTS[1], params))
    tokens = first.output_tokens + second.output_tokens
    return [first.seed, second.seed], tokens, text


def refusal(groups: ProcessGroups, directory: Path, **settings) -> str:
    """Return the error with which an engine is refused."""
    try:
        build(directory, pg_collection=groups, **settings)
    except EngineError as error:
        return str(error)
    return "loaded"


def refusal_of_others(groups: ProcessGroups, directory: Path) -> str:
    """Return the error of an engine whose ranks are given different arguments."""
    return refusal(groups, directory, window=1 + groups.tensor_rank)


def refusal_of_world(_groups: ProcessGroups, directory: Path, size: int) -> str:
    """Return the error of an engine over the whole world under another size."""
    try:
        build(directory, tensor_model_parallel_size=size)
    except EngineError as error:
        return str(error)
    return "loaded"


def megatron(groups: ProcessGroups, directory: Path) -> list[str]:
    """Return what comes of groups as Megatron collects them, without and with stages."""
    plain = SimpleNamespace(tp=groups.tensor, pp=None, dp=None)
    staged = SimpleNamespace(tp=groups.tensor, pp=groups.tensor)
    size = {"tensor_model_parallel_size": groups.tensor_size}
    engine = build(directory, pg_collection=plain, **size)
    text = engine.complete(PROMPTS[0], SEEDED).output_text
    return [text, refusal(staged, directory, **size)]


def differing(groups: ProcessGroups, directory: Path) -> list[str]:
    """Return the errors of an engine whose ranks are asked for different things, then driven."""
    engine, found = build(directory, pg_collection=groups), []
    calls = [
        lambda: engine.submit_request(PROMPTS[groups.tensor_rank], SEEDED),
        lambda: engine.submit_request(PROMPTS[0], SEEDED),
        engine.step,
    ]
    for call in calls:
        try:
            call()
        except EngineError as error:
            found.append(str(error))
    return found


def failing(groups: ProcessGroups, directory: Path) -> list[str]:
    """Return the errors of an engine whose steps fail on all ranks, where it is used again."""
    engine, found = build(directory, pg_collection=groups), []

    def fail(_batch, _step_id):
        raise RuntimeError("device is gone")

    engine._backends[0].runner.execute = fail
    for _ in range(2):
        try:
            engine.complete(PROMPTS[0], SEEDED)
        except EngineError as error:
            found.append(str(error))
    return found


def served_by_world(_groups: ProcessGroups, directory: Path) -> list[Answer]:
    """Return the answers of an engine over the whole world."""
    return answers(build(directory, tensor_model_parallel_size=4))
