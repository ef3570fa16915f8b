"""
`tandem bench offline [flags]`: tokens per second of whole engines on this machine's CPU.

All engines get the same weights, number type, threads and requests. They are the embedded engine
(`tandem`), transformers' continuous batching (`transformers`) and its `generate`
(`transformers-generate`), llama.cpp, and the linear floor (`linear-floor`), which computes the
matrix products of the same steps and nothing else. All requests arrive at once and are decoded
greedily to the same length. Each engine runs in a process of its own, rounds take them in turn, and
the printed rates are medians over the rounds: output tokens per second over all the time, and
decode tokens per second from the time at which every request has its first token.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tandem.engine_config import MAX_THREADS
from tandem.errors import InvalidConfig, TandemError
from tandem.process.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_REFUSED
from tandem.process.printing_commands import EndedBySignal
from tandem_bench.command_line import BenchParser, at_least_one, at_most, print_line, print_row
from tandem_bench.device.sizes import MODEL_SIZES
from tandem_bench.offline.checkpoints import random_model
from tandem_bench.offline.engines import ENGINES, FLOOR
from tandem_bench.offline.rounds import EngineFailed, Rounds, engines_in_turn, run_engine
from tandem_bench.offline.workload import Task
from tandem_embedded.observe.logs import quiet_unless_configured

CONCURRENCY = (1, 8, 32)
FULL_CONCURRENCY = (1, 2, 4, 8, 16, 32)
INPUT_LEN, OUTPUT_LEN, NUM_ROUNDS = 128, 64, 3
LEAST_OUTPUT_LEN = 2
"""Least output tokens of a request: prefill gives the first, so a decode rate needs another."""

_ENGINE_WIDTH = max(map(len, ENGINES))
_HEADINGS = (
    "engine".ljust(_ENGINE_WIDTH),
    "requests",
    "output tokens/s",
    "decode tokens/s",
    "of the linear floor",
    "equal tokens",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    engines = _engines(given.engine, parser)
    try:
        task = _task(given)
    except TandemError as error:
        _say(str(error))
        return EXIT_REFUSED
    rounds = Rounds()
    if not given.json:
        print_line(_title(task))
    try:
        exit_code = _run(task, engines, given.rounds, rounds)
    except EndedBySignal:  # the measurements so far took minutes: print them
        _say("interrupted: this is what was measured until then")
        _print_results(rounds, as_json=given.json)
        raise
    _print_results(rounds, as_json=given.json)
    return exit_code


def _run(task: Task, engines: Sequence[str], num_rounds: int, rounds: Rounds) -> int:
    """Run the engines in turn; leave out an engine once it has failed. Return the exit code."""
    failed: set[str] = set()
    for number, engine in engines_in_turn(engines, num_rounds):
        if engine in failed:
            continue
        where = f"round {number} of {num_rounds}: {engine}"
        _say(where)
        try:
            for line in run_engine(task.of(engine)):
                rates = rounds.add(engine, line)
                _say(
                    f"{where}, {rates.concurrency} at once: {rates.output_tokens_per_s:.1f} "
                    f"output tokens/s, {rates.decode_tokens_per_s:.1f} while all decode"
                )
        except EngineFailed as error:
            _say(f"{error}; it is left out")
            failed.add(engine)
    return EXIT_FAILED if failed else EXIT_DONE


def _engines(wanted: Sequence[str] | None, parser: BenchParser) -> list[str]:
    """Return the engines to run; one that is not installed is an error if named, else left out."""
    present = []
    for engine in ENGINES:
        if wanted and engine not in wanted:
            continue
        entry = ENGINES[engine]
        if entry.missing:
            lacks = f"{engine} needs {' and '.join(entry.missing)}: {entry.install}"
            if wanted:
                parser.error(f"--engine: {lacks}")
            _say(f"{lacks}; it is left out")
            continue
        present.append(engine)
    return present


def _task(given: argparse.Namespace) -> Task:
    """
    Make the task that every engine gets.

    Raises:
        InvalidModel: --model is not a model that the executor can compute.
        InvalidConfig: --dtype is not a number type, or requests are longer than the model allows.
    """
    # These import PyTorch: not for --help, and not before the flags are known to be right.
    import torch  # noqa: PLC0415

    from executor_svc.device.choice import choose_kernels, dtype_name, resolve_dtype  # noqa: PLC0415
    from executor_svc.device.threads import default_num_threads  # noqa: PLC0415
    from executor_svc.model.config import read_model_config  # noqa: PLC0415

    model = given.model or random_model(given.shape, MODEL_SIZES[given.shape])
    config = read_model_config(model)
    quiet_unless_configured()
    cpu = torch.device("cpu")
    choose_kernels(cpu, "auto")
    task = Task(
        engine="",
        model=model,
        dtype=dtype_name(resolve_dtype(given.dtype, config.checkpoint_dtype, cpu)),
        num_threads=given.threads or default_num_threads(),
        concurrency=tuple(given.concurrency or (FULL_CONCURRENCY if given.full else CONCURRENCY)),
        input_len=given.input_len,
        output_len=given.output_len,
    )
    if task.sequence_len > config.max_position_embeddings:
        raise InvalidConfig(
            f"{task.input_len} tokens in and {task.output_len} out are more than the "
            f"{config.max_position_embeddings} positions of {model}: lower --input-len or "
            "--output-len"
        )
    return task


def _title(task: Task) -> str:
    return (
        f"{task.model.name} in {task.dtype} on {task.num_threads} threads: requests of "
        f"{task.input_len} tokens in and {task.output_len} out, all at once."
    )


def _print_results(rounds: Rounds, *, as_json: bool) -> None:
    if as_json:
        print_line(json.dumps([rates.as_json() for rates in rounds.rates()]))
        return
    print_row(_HEADINGS, _HEADINGS)
    for rates in rounds.rates():
        share = rounds.decode_share(rates.engine, FLOOR, rates.concurrency)
        equal = rounds.num_equal(rates.engine, rates.concurrency)
        cells = (
            rates.engine.ljust(_ENGINE_WIDTH),
            str(rates.concurrency),
            f"{rates.output_tokens_per_s:.1f}",
            f"{rates.decode_tokens_per_s:.1f}",
            "-" if share is None else f"{share:.2f}",
            "-" if equal is None else f"{equal[0]} of {equal[1]}",
        )
        print_row(cells, _HEADINGS)


def _say(line: str) -> None:
    """Print to stderr a line that is not a result."""
    sys.stderr.write(f"bench offline: {line}\n")
    sys.stderr.flush()


def _output_len(text: str) -> int:
    value = at_least_one(text)
    if value < LEAST_OUTPUT_LEN:
        raise argparse.ArgumentTypeError(f"must be at least {LEAST_OUTPUT_LEN}")
    return value


def _parser() -> BenchParser:
    parser = BenchParser("offline", __doc__)
    parser.add_list("--engine", choices=ENGINES, help="engines; default: all that are installed")
    parser.add_list(
        "--concurrency",
        type=at_least_one,
        help="requests at once; several values: one measurement each; default: 1, 8 and 32",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="without --concurrency, measure 1, 2, 4, 8, 16 and 32 requests at once",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--shape",
        choices=MODEL_SIZES,
        default="llama-135m",
        help="sizes of a model with random weights, written once to the cache; default: llama-135m",
    )
    where.add_argument(
        "--model", type=Path, metavar="DIR", help="model directory in place of --shape"
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        help="number type of all engines, float32 or bfloat16; default: auto, chosen as the "
        "executor does",
    )
    parser.add_argument(
        "--threads",
        type=at_most(MAX_THREADS),
        help="CPU threads of one operation; default: one per physical core",
    )
    parser.add_argument(
        "--input-len",
        type=at_least_one,
        default=INPUT_LEN,
        help=f"tokens of each prompt; default: {INPUT_LEN}",
    )
    parser.add_argument(
        "--output-len",
        type=_output_len,
        default=OUTPUT_LEN,
        help=f"output tokens of each request, at least {LEAST_OUTPUT_LEN}; default: {OUTPUT_LEN}",
    )
    parser.add_argument(
        "--rounds",
        type=at_least_one,
        default=NUM_ROUNDS,
        help=f"rounds of all engines, of which medians are printed; default: {NUM_ROUNDS}",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list and nothing else")
    return parser
