"""The fault-free run of a storm's requests: the right outputs, and the margin of each token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tandem_client import NO_RETRY, FinishReason
from tests.faults.processes.executors import Zygote
from tests.faults.processes.rig import Rig, RigSettings
from tests.faults.workload.load import Expected, StormRequest, storm_requests
from tests.faults.workload.streams import Run, Streams

_LONG = 48
"""Number of tokens of a long output; most of them are to have so many that are certain."""


@dataclass(frozen=True, slots=True)
class Reference:
    """
    Attributes:
        requests: The requests, sent all at once.
        expected: Outputs by seed and choice.
        num_tokens: Output tokens as the server counted them, by seed.
    """

    requests: tuple[StormRequest, ...]
    expected: dict[tuple[int, int], Expected]
    num_tokens: dict[int, int]

    def problems(self, run: Run) -> list[str]:
        """Return what is wrong with a run; nothing if it is right."""
        seed = run.request.seed
        if run.error is not None:
            return [f"request {seed} failed: {run.error.reason}: {run.error.message}"]
        found = list(run.problems)
        if run.num_tokens is None or len(run.outputs) != run.request.num_choices:
            found.append("it ended early")
        are_certain = True
        for choice, output in sorted(run.outputs.items()):
            expected = self.expected[seed, choice]
            are_certain &= expected.num_certain == len(expected.output.token_ids)
            if difference := expected.difference(output):
                found.append(f"choice {choice}: {difference}")
        if are_certain and run.num_tokens != self.num_tokens[seed]:
            found.append(f"{run.num_tokens} tokens counted instead of {self.num_tokens[seed]}")
        return [f"request {seed}: {problem}" for problem in found]


def make_reference(folder: Path, model: Path, zygote: Zygote) -> Reference:
    """Send all requests once to services that report margins and have no fault."""
    requests = storm_requests()
    settings = RigSettings(link="messages", executor=("--collect-margins",), model=model)
    rig = Rig(folder, settings, zygote)
    streams = None
    try:
        rig.start()
        rig.proxies[0].ask("record")
        streams = Streams(rig.address, requests, NO_RETRY)
        streams.begin(once=True)
        streams.end()
        margins = {
            (seed, choice): row for seed, choice, row in rig.proxies[0].ask("margins")["margins"]
        }
        return _reference(requests, streams.runs, margins)
    finally:
        if streams is not None:
            streams.close()
        rig.close()


def _reference(
    requests: tuple[StormRequest, ...],
    runs: list[Run],
    margins: dict[tuple[int, int], list[float]],
) -> Reference:
    expected = {}
    for run in runs:
        assert run.error is None, run.error
        for choice, output in run.outputs.items():
            row = margins[run.request.seed, choice]
            assert len(row) >= len(output.token_ids), (run.request.seed, choice)
            expected[run.request.seed, choice] = Expected(output, row[: len(output.token_ids)])
    reference = Reference(
        requests, expected, {run.request.seed: run.num_tokens or 0 for run in runs}
    )
    _check_not_vacuous(reference)
    return reference


def _check_not_vacuous(reference: Reference) -> None:
    """
    Check that most tokens that a storm compares are certain, that outputs end at a stop string and
    at max_tokens, and that some requests have several choices.
    """
    outputs = [expected.output for expected in reference.expected.values()]
    whole = [one for one in reference.expected.values() if len(one.margins) >= _LONG]
    assert median(one.num_certain for one in whole) >= _LONG
    reasons = {output.reason for output in outputs}
    assert {FinishReason.MAX_TOKENS, FinishReason.STOP_STRING} <= reasons, reasons
    assert len(outputs) > len(reference.requests)
