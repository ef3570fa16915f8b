"""
`python -m tests.gpu.rates.tokens`: tokens of a device against those of the CPU, for the same requests to the same small model with
random weights. Prints a JSON list: a row for each number type and way of drawing.

The CPU computes each prompt at once; the device in two chunks, and its decodes by captured steps. In float32 tokens may differ only
where one was won by less than rounding (`MARGIN_EPS`), and from there on. In bfloat16 rounding is large enough to be seen: how many
requests have a first difference is what the row tells, and how many of these were won by more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from executor_svc.model.config import ModelConfig
from executor_svc.step.graphs.cuda import CudaGraphs
from executor_svc.step.runner import MARGIN_EPS, ModelRunner
from tandem.link.batch import Batch
from tandem.link.results import StepResult
from tandem.process.telemetry import configure_logging
from tandem.sampling_params import SamplingParams
from tandem_bench.device.json_rows import JsonRows
from tandem_bench.device.shapes import SHAPES
from tests.executor_svc.step.graphs.recorded import RecordedGraphs
from tests.executor_svc.stepping import Row, batch
from tests.gpu.models import BLOCK_SIZE, FILTERED, GREEDY, NOISY, decodes, make_runner, prompts

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LONGEST_PROMPT = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequests:
    """Lengths of prompts, how each request draws, and the tokens of every answer."""

    config: ModelConfig
    prompt_len: Sequence[int]
    samplings: Sequence[SamplingParams]
    output_len: int

    @classmethod
    def of(cls, *, tiny: bool) -> TokenRequests:
        """Return the requests for a GPU, or fewer to a smaller model; every other one is greedy."""
        num_requests, output_len = (8, 12) if tiny else (64, 48)
        config = replace(
            SHAPES["tiny" if tiny else "qwen3-0.6b"],
            num_layers=4,
            windows=(None, 100, None, None),
            vocab_size=1024 if tiny else 16384,
            qk_norm=True,
        )
        drawn = [replace((NOISY, FILTERED)[slot // 2 % 2], seed=slot) for slot in range(64)]
        return cls(
            config=config,
            prompt_len=[1 + 37 * slot % _LONGEST_PROMPT for slot in range(num_requests)],
            samplings=[drawn[slot] if slot % 2 else GREEDY for slot in range(num_requests)],
            output_len=output_len,
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest request at its end, in whole blocks."""
        return -(-(_LONGEST_PROMPT + self.output_len) // BLOCK_SIZE) * BLOCK_SIZE

    def steps(self, *, in_chunks: bool) -> Iterator[Batch]:
        """Yield the batches: all prompts, whole or in two chunks, then decodes of all."""
        whole = prompts(self.prompt_len, self.samplings, self.longest, self.config.vocab_size)
        if in_chunks:
            halves = [length // 2 for length in self.prompt_len]
            first = [Row(slot, 0, half, samples=False) for slot, half in enumerate(halves) if half]
            yield batch(*first, admits=whole.admits)
            yield batch(
                *(
                    Row(slot, half, length - half)
                    for slot, (half, length) in enumerate(zip(halves, self.prompt_len, strict=True))
                )
            )
        else:
            yield whole
        num_requests = len(self.prompt_len)
        yield from decodes(self.prompt_len, [num_requests] * (self.output_len - 1))


@dataclass(slots=True)
class Answer:
    """Tokens of one request, and the margins by which they were won, where those were asked for."""

    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)


def answers(runner: ModelRunner, requests: TokenRequests, *, in_chunks: bool) -> list[Answer]:
    """Compute all answers."""
    found = [Answer() for _ in requests.prompt_len]
    for number, step in enumerate(requests.steps(in_chunks=in_chunks)):
        result: StepResult = runner.execute(step, number)
        if result.row_errors:
            raise SystemExit(f"a row failed: {result.row_errors[0].message}")
        for row, slot in enumerate(result.slot.tolist()):
            found[slot].tokens.append(int(result.token[row]))
            if result.margin is not None:
                found[slot].margins.append(float(result.margin[row]))
    return found


def compared(expected: Sequence[Answer], found: Sequence[Answer], eps: float) -> dict[str, int]:
    """
    Count equal leading tokens, requests with a first difference, and those of them in which the
    token that differs was won by more than `eps`.
    """
    equal_len = [
        next(
            (
                place
                for place, (left, right) in enumerate(zip(one.tokens, other.tokens, strict=True))
                if left != right
            ),
            None,
        )
        for one, other in zip(expected, found, strict=True)
    ]
    return {
        "requests": len(expected),
        "tokens": sum(len(one.tokens) for one in expected),
        "equal_before": sum(
            len(one.tokens) if length is None else length
            for one, length in zip(expected, equal_len, strict=True)
        ),
        "first_differences": sum(length is not None for length in equal_len),
        "beyond_margin": sum(
            length is not None and one.margins[length] > eps
            for one, length in zip(expected, equal_len, strict=True)
        ),
    }


def compare(dtype: str, device: torch.device, requests: TokenRequests) -> Iterator[dict[str, Any]]:
    """Yield a row for greedy requests, and one for those that draw."""
    number_type = DTYPES[dtype]
    num_slots = len(requests.prompt_len)
    sizes = {"num_slots": num_slots, "max_model_len": requests.longest}
    reference = make_runner(requests.config, number_type, CPU, collect_margins=True, **sizes)
    expected = answers(reference, requests, in_chunks=False)
    graphs = CudaGraphs(device) if device.type == "cuda" else RecordedGraphs()
    runner = make_runner(
        requests.config, number_type, device, graphs=graphs, sizes=(num_slots,), **sizes
    )
    found = answers(runner, requests, in_chunks=True)
    for kind, first in (("greedy", 0), ("drawn", 1)):
        counts = compared(expected[first::2], found[first::2], MARGIN_EPS[number_type])
        yield {"dtype": dtype, "tokens are": kind, **counts}


def main() -> int:
    """Compare and print; 1 if a token differs in float32 that was won by more than rounding."""
    given = _parser().parse_args()
    configure_logging("warning", "console")
    requests = TokenRequests.of(tiny=given.tiny)
    device = torch.device("cuda", 0) if given.device == "cuda" else CPU
    wrong = 0
    with JsonRows() as rows:
        for dtype in DTYPES:  # float32 first: what there is no time for is what proves less
            for row in compare(dtype, device, requests):
                rows.add(row)
                wrong += row["beyond_margin"] if dtype == "float32" else 0
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="few requests of a smaller model")
    return parser


if __name__ == "__main__":
    sys.exit(main())
