"""Work of one rank of an engine that several processes share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
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


def served_few(groups: ProcessGroups | None, directory: Path, **settings) -> list[Answer]:
    """Return the answers to all kinds of requests for one prompt."""
    return answers(build(directory, pg_collection=groups, **settings), PROMPTS[:1])


def counts(groups: ProcessGroups, directory: Path) -> tuple[int, ...]:
    """Return what a rank tells of its engine: of limits it makes itself, steps and memory."""
    sizes = {"tp_size": groups.tensor_size, "pp_size": groups.pipeline_size}
    engine = InferenceEngine(None, directory, dtype="float32", pg_collection=groups, **sizes)
    engine.complete(PROMPTS[0], SEEDED)
    stats = engine.get_memory_stats()
    return engine.get_metrics().steps, stats.total_blocks, engine.config.max_model_len


def journey(groups: ProcessGroups | None, directory: Path, mode: str) -> list[Answer]:
    """
    Return the answers to requests of which some are preempted, swapped or aborted, around a
    suspension, while the ranks' clocks and speeds differ.
    """
    rank = 0 if groups is None else groups.rank
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
        build(directory, **{"pg_collection": groups, **settings})
    except EngineError as error:
        return str(error)
    return "loaded"


def refusal_of_others(groups: ProcessGroups, directory: Path) -> str:
    """Return the error of an engine whose ranks are given different arguments."""
    return refusal(groups, directory, window=1 + groups.rank)


def refusal_of_world(_groups: ProcessGroups, directory: Path, **sizes: int) -> str:
    """Return the error of an engine over the whole world under other sizes."""
    try:
        build(directory, **sizes)
    except EngineError as error:
        return str(error)
    return "loaded"


def megatron(groups: ProcessGroups, directory: Path) -> list[Answer]:
    """Return the answers of an engine over groups as Megatron collects them."""
    collected = SimpleNamespace(tp=groups.tensor, pp=groups.pipeline, mp=groups.world, dp=None)
    sizes = {
        "tensor_model_parallel_size": groups.tensor_size,
        "pipeline_model_parallel_size": groups.pipeline_size,
    }
    return answers(build(directory, pg_collection=collected, **sizes), PROMPTS[:1])


def refusal_of_part(groups: ProcessGroups, directory: Path) -> str:
    """Return the error of an engine over stages whose common group is that of one stage."""
    collected = SimpleNamespace(tp=groups.tensor, pp=groups.pipeline, mp=groups.tensor)
    return refusal(groups, directory, pg_collection=collected)


def refusal_of_transposed(groups: ProcessGroups, directory: Path) -> str:
    """Return the error of an engine over groups of which tp and pp are exchanged."""
    collected = SimpleNamespace(tp=groups.pipeline, pp=groups.tensor, mp=groups.world)
    return refusal(groups, directory, pg_collection=collected)


def differing(groups: ProcessGroups, directory: Path) -> list[str]:
    """Return the errors of an engine whose ranks are asked for different things, then driven."""
    engine, found = build(directory, pg_collection=groups), []
    calls = [
        lambda: engine.submit_request(PROMPTS[groups.rank], SEEDED),
        lambda: engine.submit_request(PROMPTS[0], SEEDED),
        engine.step,
    ]
    for call in calls:
        try:
            call()
        except EngineError as error:
            found.append(str(error))
    return found


def out_of_step(groups: ProcessGroups, directory: Path, number: int) -> str:
    """Return the error of an engine of which one rank makes a step, and others submit more."""
    engine = build(directory, pg_collection=groups)
    engine.submit_request(PROMPTS[0], SEEDED)
    try:
        if groups.rank == number:
            engine.step()
        else:
            engine.submit_request(PROMPTS[0], SEEDED)
    except EngineError as error:
        return str(error)
    return ""


def failing(
    groups: ProcessGroups, directory: Path, error: Exception
) -> list[tuple[list[str], str]]:
    """
    Return the errors of an engine whose steps fail on all ranks, where it is used again: each with
    its type, and the types of its first causes.
    """
    engine, found = build(directory, pg_collection=groups), []

    def fail(_batch, _step_id):
        raise error

    runner = engine._backends[0].runner
    runner.execute = runner.launch = fail
    engine.submit_request(PROMPTS[0], SEEDED)
    for _ in range(2):
        try:
            engine.step()
        except (EngineError, TypeError, RuntimeError) as caught:
            causes = [caught, *islice(causes_of(caught), 4)]
            found.append(([type(one).__name__ for one in causes], str(caught)))
    return found


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the cause of an error, the cause of that, and so on."""
    while error.__cause__ is not None:
        error = error.__cause__
        yield error


def served_by_world(_groups: ProcessGroups, directory: Path, **sizes: int) -> list[Answer]:
    """Return the answers of an engine over the whole world."""
    with build(directory, **sizes) as engine:
        return answers(engine, PROMPTS[:1])


def most_under_way(groups: ProcessGroups, directory: Path, window: int) -> list[int]:
    """
    Return the most steps that a rank has under way, of many requests and then of one; close the
    engine with steps under way.
    """
    with build(directory, pg_collection=groups, window=window) as engine:
        (worker,) = engine._driver._workers
        found = []
        for prompts in (PROMPTS, PROMPTS[:1], PROMPTS):
            for prompt in prompts:
                engine.submit_request(prompt, SEEDED)
            depths = []
            for _ in range(20):
                engine.step()
                depths.append(len(worker._under_way))
            found.append(max(depths[8:]))
            if len(found) < 3:
                engine.run()
        return found
