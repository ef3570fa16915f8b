"""
Margins by which each token of a request won, read off the step link of an executor with
--collect-margins.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.link.batch import Batch
from tandem.link.codec.wire import decode_request, decode_response
from tandem.link.commands import Step
from tandem.link.results import StepResult

RowKey = tuple[int, int]
"""Seed and choice: they tell rows apart if no two requests have the same seed."""


@dataclass(slots=True)
class _Row:
    key: RowKey
    num_prompt_tokens: int


class MarginRecorder:
    """Recorder of both ways of a stream; a row that is admitted again keeps its earlier margins."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], _Row] = {}
        self._margins: dict[RowKey, dict[int, float]] = {}

    def note(self, raw: bytes, way: str) -> None:
        """Take one message as it passes."""
        if way == "down":
            step = decode_request(raw)
            if isinstance(step, Step) and isinstance(step.command, Batch):
                self._note_batch(step.command)
        else:
            result = decode_response(raw)
            if isinstance(result, StepResult):
                self._note_result(result)

    def as_json(self) -> list[list[object]]:
        """Return ``[seed, choice, margins by output index]`` of every row."""
        return [
            [seed, choice, [margins[index] for index in range(len(margins))]]
            for (seed, choice), margins in self._margins.items()
        ]

    def _note_batch(self, batch: Batch) -> None:
        for admitted in batch.admits:
            key = admitted.sampling.seed, admitted.sampling.choice
            row = _Row(key, admitted.num_prompt_tokens)
            self._rows[admitted.slot, admitted.generation] = row

    def _note_result(self, result: StepResult) -> None:
        if not len(result.slot):
            return
        assert result.margin is not None, "the executor runs without --collect-margins"
        columns = (result.slot, result.generation, result.position, result.margin)
        for slot, generation, position, margin in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            row = self._rows[slot, generation]
            self._margins.setdefault(row.key, {})[position - row.num_prompt_tokens] = margin
