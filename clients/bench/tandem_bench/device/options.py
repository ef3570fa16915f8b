"""Options and output that the benchmarks of the executor (kernels, model, roofline) share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import structlog
import torch

from executor_svc.device.choice import (
    choose_kernels,
    cpu_multiplies_bfloat16,
    dtype_name,
    resolve_device,
    resolve_dtype,
)
from executor_svc.device.threads import use_threads
from tandem.engine_config import MAX_THREADS
from tandem.errors import InvalidConfig
from tandem.process.telemetry import configure_logging
from tandem_bench.command_line import BenchParser, at_most, print_line, time_above_zero

_LARGEST_BLOCK = 1024
"""Largest block in tokens: rows hold whole blocks, so larger ones fill memory that no row reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """
    Device, number type and threads of a measurement.

    Attributes:
        device: Device that computes.
        dtype: Number type of weights, activations and cache.
        num_threads: CPU threads of one operation.
    """

    device: torch.device
    dtype: torch.dtype
    num_threads: int

    @property
    def text(self) -> str:
        """Description in one line, for tables."""
        name = str(self.device)
        if self.device.type == "cuda":
            name += f" {torch.cuda.get_device_name(self.device)}"
        else:
            name += f", {self.num_threads} threads"
        return f"{name}, {dtype_name(self.dtype)}, torch {torch.__version__}"


def parser(name: str, description: str | None) -> BenchParser:
    """Make a parser with the flags that all benchmarks of the executor have."""
    made = BenchParser(name, description)
    made.add_argument(
        "--device", default="auto", help="device: cpu, cuda or cuda:N; default: auto, a GPU if any"
    )
    made.add_argument(
        "--dtype",
        default="auto",
        help="number type of weights, activations and KV cache: float32, bfloat16 or float16; "
        "default: auto, bfloat16 on a GPU or a CPU that multiplies it, else float32",
    )
    made.add_argument(
        "--cpu-extension",
        choices=("auto", "on", "off"),
        default="auto",
        help="C++ kernels on a CPU, for kernels and model; default: auto, where they can be built",
    )
    made.add_argument(
        "--num-threads",
        type=at_most(MAX_THREADS),
        help="CPU threads of one operation; default: one per physical core",
    )
    made.add_argument(
        "--full", action="store_true", help="many more points; kernels and model take minutes then"
    )
    made.add_argument(
        "--time-limit",
        type=time_above_zero,
        help="seconds after which no measurement of kernels or model begins; default: 36 and 33, "
        "with --full none",
    )
    made.add_argument("--json", action="store_true", help="print one JSON list and nothing else")
    return made


def add_block_size(parser: BenchParser) -> None:
    """Add the flag of the benchmarks that have a KV cache."""
    parser.add_argument(
        "--block-size",
        type=at_most(_LARGEST_BLOCK),
        default=16,
        help="tokens per KV block; default: 16",
    )


def place(given: argparse.Namespace, *, attends: bool = True) -> Where:
    """
    Set up the device, number type and threads that were asked for, and logging to stderr.

    Args:
        given: Parsed command line.
        attends: Attention is among what is measured, so that the CPU's C++ library may be built.

    Raises:
        InvalidConfig: There is no such device or type, or the C++ library was asked for and is not
            available.
    """
    configure_logging("warning" if given.json else "info", "console")
    device = resolve_device(given.device)
    use_threads(given.num_threads)
    if attends:
        choose_kernels(device, given.cpu_extension)
    dtype = resolve_dtype(given.dtype, "bfloat16", device)
    if device.type == "cpu" and dtype == torch.bfloat16 and not cpu_multiplies_bfloat16():
        structlog.get_logger(__name__).warning("bfloat16_is_emulated", device="cpu")
    return Where(device=device, dtype=dtype, num_threads=torch.get_num_threads())


def time_limit_s(given: argparse.Namespace, usual_s: float) -> float | None:
    """Return --time-limit where given, else `usual_s`, or with --full None for no limit."""
    if given.time_limit is not None:
        return float(given.time_limit)
    return None if given.full else usual_s


def chosen(names: Sequence[str] | None, known: Iterable[str], what: str) -> list[str]:
    """
    Return the names given, or without any all known ones.

    Raises:
        InvalidConfig: A name is not known; `what` says what it should name.
    """
    known = list(known)
    for name in names or ():
        if name not in known:
            raise InvalidConfig(f"no {what} is called {name!r}; there are: {', '.join(known)}")
    return list(names or known)


class Table:
    """Table that prints each row as it comes, in columns of fixed widths."""

    def __init__(self, headings: Sequence[tuple[str, int]]) -> None:
        """
        Print the headings.

        Args:
            headings: Name and width of each column; a negative width is left-aligned.
        """
        self._widths = [width for _, width in headings]
        self.row([name for name, _ in headings])

    def row(self, cells: Sequence[str]) -> None:
        """Print one row."""
        print_line(
            "  ".join(
                cell.ljust(-width) if width < 0 else cell.rjust(width)
                for cell, width in zip(cells, self._widths, strict=True)
            ).rstrip()
        )


def complain(name: str, text: str) -> None:
    """Print one line to stderr."""
    sys.stderr.write(f"bench {name}: {text}\n")
    sys.stderr.flush()
