"""`tandem bench kernels`, `model` and `roofline`: measurements of the executor's parts."""

from __future__ import annotations

from typing import Annotated

import typer

from tandem_client.cli import options
from tandem_client.cli.bench_child import run_bench
from tandem_client.cli.failures import EXIT_CODES_HELP, readable_errors

SizesOf = Annotated[
    list[str] | None,
    typer.Option(
        help="tiny, llama-135m, llama-360m, qwen3-0.6b, llama-1b or llama-8b; repeatable."
    ),
]
Batch = Annotated[
    list[int] | None, typer.Option(min=1, help="Number of rows that decode in a step; repeatable.")
]
Context = Annotated[
    list[int] | None, typer.Option(min=1, help="Context length of each row; repeatable.")
]
BlockSize = Annotated[int, typer.Option(min=1, help="Tokens per KV block.")]
Seconds = Annotated[
    float | None, typer.Option(min=0.0001, help="Seconds that each case is measured, about.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[
    str, typer.Option(help="bfloat16, float16, float32, or auto: bfloat16 where it is fast.")
]
CpuExtension = Annotated[
    str, typer.Option(help="C++ kernels on a CPU: on, off, or auto: where they compile.")
]
NumThreads = Annotated[int | None, typer.Option(min=1, help="CPU threads of one operation.")]


def add_to(bench: typer.Typer) -> None:
    """Add the commands to a group."""
    for name, command in (("kernels", kernels), ("model", decode_steps), ("roofline", roofline)):
        bench.command(name, epilog=EXIT_CODES_HELP)(command)


@readable_errors
def kernels(
    *,
    operation: Annotated[
        list[str] | None,
        typer.Option(help="decode, prefill, rows, sampling or patch; repeatable. Default: all."),
    ] = None,
    model: SizesOf = None,
    block_size: BlockSize = 16,
    no_peers: Annotated[
        bool, typer.Option("--no-peers", help="Do not measure PyTorch and FlashInfer beside ours.")
    ] = False,
    seconds: Seconds = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    num_threads: NumThreads = None,
    cpu_extension: CpuExtension = "auto",
    full: Annotated[
        bool, typer.Option("--full", help="Measure many more sizes; takes minutes.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Measure each operation on a device, and compare it with the device's limits."""
    flags = ["kernels", "--block-size", str(block_size)] + ["--no-peers"] * no_peers
    flags += _executor_flags(device, dtype, num_threads, cpu_extension, seconds)
    for flag, names in (("--operation", operation), ("--model", model)):
        flags += [flag, *names] if names else []
    run_bench(flags + ["--full"] * full + ["--json"] * as_json)


@readable_errors
def decode_steps(
    *,
    model: SizesOf = None,
    batch: Batch = None,
    context: Context = None,
    block_size: BlockSize = 16,
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant", help="Use kernels that give a row the same bits in any batch."
        ),
    ] = False,
    eager: Annotated[bool, typer.Option("--eager", help="Use no CUDA graphs, on a GPU.")] = False,
    seconds: Seconds = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    num_threads: NumThreads = None,
    cpu_extension: CpuExtension = "auto",
    full: Annotated[
        bool, typer.Option("--full", help="Measure more sizes and batches; takes minutes.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Measure decode steps of models with random weights, beside the least they could take."""
    flags = ["model", "--block-size", str(block_size)] + ["--eager"] * eager
    flags += ["--batch-invariant"] * batch_invariant
    flags += _executor_flags(device, dtype, num_threads, cpu_extension, seconds)
    flags += ["--model", *model] if model else []
    for flag, counts in (("--batch", batch), ("--context", context)):
        flags += [flag, *map(str, counts)] if counts else []
    run_bench(flags + ["--full"] * full + ["--json"] * as_json)


@readable_errors
def roofline(
    *,
    model: SizesOf = None,
    batch: Batch = None,
    context: Context = None,
    tb_per_s: Annotated[
        float | None, typer.Option(min=1e-6, help="Memory bandwidth, instead of measuring it.")
    ] = None,
    tflop_per_s: Annotated[
        float | None,
        typer.Option(min=1e-6, help="Rate of matrix products, instead of measuring it."),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    num_threads: NumThreads = None,
    cpu_extension: CpuExtension = "auto",
    full: Annotated[
        bool, typer.Option("--full", help="Compute more batches and contexts.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Measure a device's bandwidth and matrix rate, and derive the least time of decode steps."""
    flags = ["roofline", *_executor_flags(device, dtype, num_threads, cpu_extension)]
    flags += ["--model", *model] if model else []
    for flag, counts in (("--batch", batch), ("--context", context)):
        flags += [flag, *map(str, counts)] if counts else []
    for flag, rate in (("--tb-per-s", tb_per_s), ("--tflop-per-s", tflop_per_s)):
        flags += [] if rate is None else [flag, str(rate)]
    run_bench(flags + ["--full"] * full + ["--json"] * as_json)


def _executor_flags(
    device: str,
    dtype: str,
    num_threads: int | None,
    cpu_extension: str,
    seconds: float | None = None,
) -> list[str]:
    flags = ["--device", device, "--dtype", dtype, "--cpu-extension", cpu_extension]
    for flag, value in (("--num-threads", num_threads), ("--seconds", seconds)):
        flags += [] if value is None else [flag, str(value)]
    return flags
