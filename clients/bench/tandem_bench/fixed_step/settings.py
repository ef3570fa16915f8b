"""Command line of the executor without a model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.engine_config import EngineConfig
from tandem.process.process_flags import add_log_level_flag, add_ready_file_flag

DEFAULT_TOKENIZER = Path(__file__).resolve().parents[4] / "deploy" / "models" / "tandem-py"


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedStepSettings:
    """
    Settings of an executor without a model.

    Attributes:
        step_ms: Duration of every step with rows, in milliseconds.
        listen: gRPC address, HOST:PORT (port 0 takes a free one) or unix:PATH.
        tokenizer: Directory with tokenizer.json.
        limits: Engine limits, among them the number of KV blocks that it reports.
        seed: Number of the pretended model: another seed gives another fingerprint and other
            tokens.
        max_inflight_steps: Most steps in flight, the credit that a scheduler gets.
        ready_file: File that gets address and pid as JSON once the port listens.
        log_level: Least severe event to log, to stderr.
    """

    step_ms: float
    listen: str
    tokenizer: Path
    limits: EngineConfig
    seed: int
    max_inflight_steps: int
    ready_file: Path | None
    log_level: str


def read_settings(argv: Sequence[str]) -> FixedStepSettings:
    """
    Read the command line.

    Raises:
        SystemExit: After --help, or for a flag that cannot be read (exit code 2).
        InvalidConfig: The limits contradict each other.
    """
    given = _parser().parse_args(argv)
    limits = EngineConfig(
        block_size=given.block_size,
        max_num_blocks=given.max_num_blocks,
        max_batch_size=given.rows,
        max_num_seqs=given.rows,
        max_model_len=given.max_model_len,
        max_total_tokens=max(given.max_total_tokens, given.rows),
    )
    limits.validate()
    return FixedStepSettings(
        step_ms=given.step_ms,
        listen=given.listen,
        tokenizer=given.tokenizer,
        limits=limits,
        seed=given.seed,
        max_inflight_steps=given.max_inflight_steps,
        ready_file=given.ready_file,
        log_level=given.log_level,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tandem_bench.fixed_step",
        description="An executor service without a model: every step takes a fixed time.",
        epilog="SIGUSR1 prints one JSON line to stdout: time idle and busy while requests ran, in "
        "nanoseconds since the start; so does a stop.",
    )
    parser.add_argument(
        "--step-ms",
        type=_milliseconds,
        default=2.0,
        help="duration of a step in milliseconds; default: 2",
    )
    parser.add_argument(
        "--listen",
        default="127.0.0.1:50061",
        help="HOST:PORT or unix:PATH; port 0 takes a free one; default: 127.0.0.1:50061",
    )
    parser.add_argument("--rows", type=int, default=256, help="most rows of a step; default: 256")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block; default: 16")
    parser.add_argument(
        "--max-num-blocks", type=int, default=1 << 18, help="KV blocks; default: 262144"
    )
    parser.add_argument(
        "--max-model-len",
        type=int,
        default=16_384,
        help="most tokens of a sequence; default: 16384",
    )
    parser.add_argument(
        "--max-total-tokens", type=int, default=8192, help="most tokens of a step; default: 8192"
    )
    parser.add_argument(
        "--max-inflight-steps", type=_positive, default=16, help="steps in flight; default: 16"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        default=DEFAULT_TOKENIZER,
        metavar="DIR",
        help="directory with tokenizer.json; default: the bundled model",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the tokens and of the fingerprint; default: 0"
    )
    add_ready_file_flag(parser)
    add_log_level_flag(parser)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _milliseconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 3_600_000:
        raise argparse.ArgumentTypeError("must be between 0 and an hour")
    return value
