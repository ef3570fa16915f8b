"""Requests that show the stages of a model: several steps in flight, and what a stage holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from executor_svc.device.choice import choose_kernels
from executor_svc.parallel.collectives import AllRanks
from executor_svc.parallel.process_groups import SINGLE, ProcessGroups
from tandem.errors import SessionLost
from tandem.link.results import StepResult
from tests.executor_svc.parallel.workload import CPU, SEEDED
from tests.executor_svc.step.test_static_step import (
    BLOCK_SIZE,
    FILTERED,
    GREEDY,
    NOISY,
    PENALISED,
    TOLD,
    Traffic,
    joins_and_leaves,
)
from tests.executor_svc.stepping import Bench, Row, admission, batch, random_tokens

SAME = {"block_size": BLOCK_SIZE, "num_blocks": 64, "num_slots": 6, "max_model_len": 64}
IN_FLIGHT = 4
"""Steps that are launched before the first result is asked for."""
ASKED = replace(TOLD, logprobs=0, logprob_token_ids=(7, 250), prompt_logprobs=2)
SCORED = replace(GREEDY, prompt_logprobs=0)


@dataclass(kw_only=True)
class Told:
    """
    A rank's view of some steps.

    Attributes:
        tokens: Slots, positions and tokens of each step.
        logprobs: Log probabilities of tokens and prompts, of steps that have any.
        checksum: Checksum of the tokens on the device, after the last step.
        history: All tokens there.
    """

    tokens: list[list[list[int]]]
    logprobs: list[list[float]]
    checksum: int
    history: list[list[int]]


def in_flight(groups: ProcessGroups = SINGLE, directory: Path = Path()) -> Told:
    """Compute requests that come and go, with several steps in flight at a time."""
    bench = _bench(groups, directory)
    steps = [*joins_and_leaves(bench.block_ids, [FILTERED, PENALISED, ASKED])]
    collects, results = [], []
    for step, plan in enumerate(steps):
        collects.append(bench.runner.launch(plan, step))
        if len(collects) == IN_FLIGHT:
            results.append(collects.pop(0)())
    return _told(bench, [*results, *(collect() for collect in collects)])


def lanes(groups: ProcessGroups = SINGLE, directory: Path = Path()) -> Told:
    """
    Compute requests of two lanes in turn. All stages but the first begin once that has launched a
    step of each lane.
    """
    bench, ranks = _bench(groups, directory), AllRanks(groups)
    traffics = [Traffic(bench.block_ids[:30]), Traffic(bench.block_ids[30:])]
    plans = [each.join(lane, 9 + lane, NOISY) for lane, each in enumerate(traffics)]
    plans += [traffics[step % 2].decode() for step in range(8)]
    if groups.pipeline_rank:
        ranks.all_of(None)
    collects = [bench.runner.launch(plan, step) for step, plan in enumerate(plans[:2])]
    if not groups.pipeline_rank:
        ranks.all_of(None)
    results = []
    for step, plan in enumerate(plans[2:], 2):
        collects.append(bench.runner.launch(plan, step))
        results.append(collects.pop(0)())
    return _told(bench, [*results, *(collect() for collect in collects)])


def chunked(groups: ProcessGroups, directory: Path, begun: Path) -> bool:
    """
    Compute a part of a prompt, which samples nothing, and tell whether the last stage had begun
    when its result was known.
    """
    bench, ranks = _bench(groups, directory), AllRanks(groups)
    admit = bench.admit(0, random_tokens(40, seed=3))
    plan = batch(Row(0, 0, 30, samples=False), admits=[admit])
    if groups.pipeline_rank:
        ranks.all_of(None)
        begun.touch()
        collect = bench.runner.launch(plan, 1)
    else:
        collect = bench.runner.launch(plan, 1)
        ranks.all_of(None)
    result = collect()
    return len(result.token) == 0 and begun.exists()


def reused(groups: ProcessGroups = SINGLE, directory: Path = Path()) -> Told:
    """
    Compute a request whose slot goes to a shorter one while its last step is in flight, and to one
    that samples nothing; the newer ones do not wait for the tokens of the older.
    """
    bench = _bench(groups, directory)
    prompts = [random_tokens(length, seed=length) for length in (9, 4, 20)]
    blocks = bench.take_blocks(40)
    admits = [
        admission(0, prompt, blocks[:4], generation=1 + index, sampling=SCORED)
        for index, prompt in enumerate(prompts)
    ]
    plans = [
        batch(Row(0, 0, 9), admits=admits[:1]),
        batch(Row(0, 9)),
        batch(Row(0, 0, 4, samples=False), admits=admits[1:2], releases=[0]),
        batch(Row(0, 0, 12, samples=False), admits=admits[2:], releases=[0]),
        batch(Row(0, 12, 8)),
    ]
    collects = [bench.runner.launch(plan, step) for step, plan in enumerate(plans)]
    return _told(bench, [collect() for collect in collects])


def errors(groups: ProcessGroups = SINGLE, directory: Path = Path()) -> list[tuple[int, str]]:
    """
    Return the slots and kinds of rows that fail because of an unknown id, and of a projection that
    is broken on the stages that have one; a good row is beside the first.
    """
    bench = _bench(groups, directory)
    unknown, good = [1, 2, 9999], [1, 2, 3]
    admits = [bench.admit(slot, prompt) for slot, prompt in enumerate([unknown, good])]
    rows = [Row(slot, 0, 3) for slot in (0, 1)]
    results = [bench.runner.execute(batch(*rows, admits=admits), 1)]
    bench.runner._model.weights.lm_head[:3].fill_(float("nan"))
    results.append(bench.runner.execute(batch(Row(1, 3)), 2))
    return [(one.slot, one.kind.name) for result in results for one in result.row_errors]


def refused(groups: ProcessGroups = SINGLE, directory: Path = Path()) -> list[int]:
    """Contradict the slots with a step in flight, forget all slots, and return a token after it."""
    bench = _bench(groups, directory)
    prompt = random_tokens(9, seed=4)
    admit = admission(0, prompt, bench.take_blocks(14), sampling=SEEDED)
    bench.runner.launch(batch(Row(0, 0, 9), admits=[admit]), 1)
    try:
        bench.runner.launch(batch(Row(5, 0)), 2)
    except SessionLost:
        bench.runner.reset()
        again = batch(Row(0, 0, 9), admits=[admit])
        return bench.runner.execute(again, 3).token.tolist()
    return []


def is_stacked(groups: ProcessGroups, directory: Path) -> bool:
    """Tell whether a stage computes its packed layers in one call."""
    choose_kernels(CPU, "on")
    bench = Bench.build(directory, groups=groups, packs=True)
    choose_kernels(CPU, "off")
    return bench.runner._decoder._stack is not None


def _bench(groups: ProcessGroups, directory: Path) -> Bench:
    """
    Build a bench that computes with the definitions, as ranks of the pool do, whatever this process
    chose before: the C++ library's log probabilities differ in their last bits.
    """
    choose_kernels(CPU, "off")
    return Bench.build(directory, groups=groups, **SAME)


def _told(bench: Bench, results: list[StepResult]) -> Told:
    assert not any(result.row_errors for result in results)
    told = [result.logprobs for result in results]
    told += [result.prompt_logprobs and result.prompt_logprobs.columns for result in results]
    checksum = bench.runner.checksum()
    every_slot = np.arange(SAME["num_slots"], dtype=np.int32)
    return Told(
        tokens=[
            [np.asarray(column).tolist() for column in (one.slot, one.position, one.token)]
            for one in results
        ],
        logprobs=[[*one.chosen.tolist(), *one.top.tolist()] for one in told if one is not None],
        checksum=checksum,
        history=bench.runner._tokens.histories(every_slot, SAME["max_model_len"]).tolist(),
    )
