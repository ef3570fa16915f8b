"""The requests of every case, what one rank answers to each alone, and how a case's are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median

from scheduler_svc.core.request.options import CoreOptions
from tandem.engine_config import EngineConfig
from tandem_embedded import CompletedChoice, InferenceEngine
from tests.model_zoo import FAMILIES
from tests.threads import NUM_THREADS
from tests.truth.equality import Comparison, assert_same_logprobs
from tests.truth.matrix.cases import Case
from tests.truth.matrix.cell import OPTIONS, Cell
from tests.truth.matrix.rank_processes import RankProcesses
from tests.truth.requests import NEIGHBOURS, PENALISED, SEEDED, TARGETS, TruthRequest

NUM_CHOICES = 3
FORKED = replace(SEEDED, seed=5, logprobs=1)
"""The request of several choices."""
PLAIN = (*TARGETS.values(), PENALISED["greedy"], PENALISED["seeded"], NEIGHBOURS[-1])
"""
Requests of one choice: greedy and seeded, without and with penalties and log probabilities, and one
whose prompt is longer than a step.
"""
NUM_TOKENS = 32
"""Length of outputs; every token costs all ranks of a case dozens of collectives."""
REQUESTS = [
    (replace(request, max_tokens=NUM_TOKENS), num_choices)
    for request, num_choices in ((FORKED, NUM_CHOICES), *((plain, 1) for plain in PLAIN))
]
"""All of them with the number of their choices; all but the longest have the same prompt."""

Reference = dict[TruthRequest, tuple[CompletedChoice, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """
    Counts of one case: how much was compared, and that all it is to have happened.

    Attributes:
        compared: Median number of tokens of a choice that were compared.
        preemptions: Requests that lost their KV blocks.
        swapped_out: KV blocks that went to host memory.
        swapped_in: Those that came back; none does where the device still has them.
        recomputed: Preempted requests that were computed again for lack of host blocks.
        cached_tokens: Tokens that were found in prefix caches.
        steps: Steps of each executor.
        most_in_flight: Most steps in flight of each executor.
    """

    compared: float
    preemptions: int
    swapped_out: int
    swapped_in: int
    recomputed: int
    cached_tokens: int
    steps: tuple[int, ...]
    most_in_flight: tuple[int, ...]

    def check(self, case: Case) -> None:
        """Assert that the case had all that it is to have: each executor, lane and way of memory."""
        happened = (self.preemptions, self.swapped_out, self.recomputed, self.cached_tokens)
        assert all(happened), self
        assert case.dp == len(self.steps)
        assert min(self.steps) > 20, self
        assert (OPTIONS.window * case.pp,) * case.dp == self.most_in_flight


def references(folder: Path) -> Callable[[str], tuple[Path, Reference]]:
    """
    Return a function: the model directory of a family, and the answers of one rank to each request
    alone.
    """

    @cache
    def of(family: str) -> tuple[Path, Reference]:
        model_dir = FAMILIES[family](folder / family)
        engine = InferenceEngine(
            EngineConfig(max_num_blocks=64, max_model_len=256),
            model_dir,
            dtype="float32",
            num_threads=NUM_THREADS,
            collect_margins=True,
            cpu_extension="off",
            options=CoreOptions(prefix_caching=False),
        )
        with engine:
            return model_dir, {
                request: engine.complete(
                    list(request.prompt), replace(request.params, n=num_choices)
                ).choices
                for request, num_choices in REQUESTS
            }

    return of


def check_case(
    case: Case, processes: RankProcesses, model_dir: Path, reference: Reference
) -> Report:
    """
    Serve all requests together in the shape of a case, and check that each choice gets the tokens
    and log probabilities that it gets from one rank alone.

    A failure ends all processes, as ranks of the case may wait for each other without a limit; the
    next case starts others.
    """
    try:
        return _checked(case, Cell(model_dir, case, processes), reference)
    except BaseException:
        processes.stop()
        raise


def _checked(case: Case, cell: Cell, reference: Reference) -> Report:
    handles = {request: cell.submit(request, count) for request, count in REQUESTS}
    found = cell.run()
    comparison = Comparison()
    for request, choices in reference.items():
        for handle, expected in zip(handles[request], choices, strict=True):
            own, what = found[handle], f"handle {handle}"
            comparison.check(expected.output_tokens, own.tokens, expected.margins, what)
            assert_same_logprobs(expected.logprobs, own.logprobs, expected.margins)
    comparison.assert_not_vacuous()
    stats = cell.core.stats()
    report = Report(
        compared=median(comparison.compared),
        preemptions=stats.preemptions,
        swapped_out=stats.swapped_out_blocks,
        swapped_in=stats.swapped_in_blocks,
        recomputed=stats.swap_fallbacks,
        cached_tokens=stats.prefix_cache_hit_tokens,
        steps=tuple(one.num_steps for one in cell.executors),
        most_in_flight=tuple(one.most_in_flight for one in cell.executors),
    )
    report.check(case)
    cell.end()
    return report
