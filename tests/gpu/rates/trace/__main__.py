"""
`python -m tests.gpu.rates.trace`: where the time of steps goes, by PyTorch's profiler.

Decode steps of models with random weights are recorded, replayed from graphs and eager, and steps
in which a prompt's chunk is computed beside decodes. Each row of the JSON list gives, per step, the
time, the number of kernels and their time, the gaps between them with the kernels around the
largest, the kernels that take longest, and each operation's share.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from executor_svc.profile.quiet import silence_profiler
from kernels.early_launch import use_early_launches
from tandem.process.telemetry import configure_logging
from tandem_bench.device.sizes import MODEL_SIZES
from tests.gpu.parts import EXIT_NO_DEVICE

MODELS = ("llama-8b", "llama-1b", "qwen3-0.6b")


def main(arguments: list[str] | None = None) -> int:
    """Record and print; return the exit code, which is 1 if nothing could be recorded."""
    given = _parser().parse_args(arguments)
    deadline_s = time.monotonic() + given.limit_s
    silence_profiler(os.environ)  # read when PyTorch is imported
    import torch  # noqa: PLC0415  # takes seconds

    from tests.gpu.rates.trace.run import record_all  # noqa: PLC0415  # imports it too

    if given.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("trace: no CUDA device was found; --device cpu --tiny tries it without\n")
        return EXIT_NO_DEVICE
    configure_logging("warning", "console")
    use_early_launches(on=given.early_launches)
    return record_all(
        given.model or (("tiny",) if given.tiny else MODELS),
        device_name=given.device,
        tiny=given.tiny,
        folder=given.traces,
        deadline_s=deadline_s,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.rates.trace",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--tiny", action="store_true", help="a small model, for a CPU")
    parser.add_argument("--model", nargs="+", choices=sorted(MODEL_SIZES), help="only these")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder for compressed traces")
    parser.add_argument(
        "--early-launches",
        action="store_true",
        help="let programs of kernels start while the kernel before ends",
    )
    parser.add_argument("--limit-s", type=float, default=150.0, help="when nothing more begins")
    return parser


if __name__ == "__main__":
    sys.exit(main())
