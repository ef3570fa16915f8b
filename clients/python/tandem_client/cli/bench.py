"""`tandem bench`: measure a running server, or what its parts take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tandem_client.channel import DEFAULT_ADDRESS
from tandem_client.cli import bench_executor, options
from tandem_client.cli.bench_child import run_bench
from tandem_client.cli.failures import EXIT_CODES_HELP, ExitCode, fail, readable_errors
from tandem_client.client import Client
from tandem_client.load.processes import run_tasks
from tandem_client.load.report import errors_by_reason, summarize
from tandem_client.load.worker import Outcomes, Task
from tandem_client.load.workload import Workload, read_prompts

DEFAULT_REQUESTS = 64

bench = typer.Typer(help="Measure a running server, or its parts alone.", no_args_is_help=True)


@bench.callback()
def _bench() -> None:
    pass


bench_executor.add_to(bench)


Requests = Annotated[
    int | None, typer.Option(min=1, help="How many; default: 64, or each prompt of the file once.")
]
Concurrency = Annotated[int, typer.Option(min=1, help="How many at once, over all.")]
Processes = Annotated[int, typer.Option(min=1, help="Processes that send them.")]
InputLen = Annotated[int, typer.Option(min=1, help="Tokens per random prompt.")]
OutputLen = Annotated[int, typer.Option(min=1, help="Tokens per answer; with --prompts, the most.")]
Prompts = Annotated[
    Path | None,
    typer.Option(help='JSON lines with "prompt", "messages" or "token_ids", instead.'),
]
Seed = Annotated[int, typer.Option(help="Of the random prompts.")]
Temperature = Annotated[float, typer.Option(help="Of every request.")]
WarmUp = Annotated[int, typer.Option(min=0, help="Short requests per process, not counted.")]
MaxTime = Annotated[
    float, typer.Option(help="Start no request after this; five seconds later all is cut off.")
]
Running = Annotated[
    list[int] | None,
    typer.Option(min=1, help="Requests that decode; repeatable. Default: 1, 32, 128, 256, 1024."),
]
Waiting = Annotated[
    list[int] | None,
    typer.Option(min=0, help="Requests that wait meanwhile; repeatable. Default: 0, 500, 5000."),
]


@bench.command(epilog=EXIT_CODES_HELP)
@readable_errors
def serve(
    *,
    address: options.Address = DEFAULT_ADDRESS,
    requests: Requests = None,
    concurrency: Concurrency = 16,
    processes: Processes = 1,
    input_len: InputLen = 64,
    output_len: OutputLen = 64,
    prompts: Prompts = None,
    seed: Seed = 0,
    temperature: Temperature = 0.0,
    warm_up: WarmUp = 4,
    max_time_s: MaxTime = 30.0,
    as_json: options.Json = False,
) -> None:
    """Send requests from as many processes as asked, and print latencies and throughput."""
    with Client(address, retry=options.RETRY) as client:
        model = client.get_model()
    lines = () if prompts is None else read_prompts(prompts)
    workload = Workload(
        num_requests=requests or len(lines) or DEFAULT_REQUESTS,
        input_len=input_len,
        output_len=output_len,
        vocab_size=model.vocab_size,
        seed=seed,
        temperature=temperature,
        lines=lines,
    )
    processes = min(processes, concurrency)
    outcomes = run_tasks(
        [
            Task(
                address=address,
                workload=workload,
                first=index,
                step=processes,
                concurrency=concurrency // processes + (index < concurrency % processes),
                num_warm_up=warm_up,
                max_time_s=max_time_s,
            )
            for index in range(processes)
        ]
    )
    _report(outcomes, workload.num_requests, f"{model.name} at {address}", as_json=as_json)


@bench.command(epilog=EXIT_CODES_HELP)
@readable_errors
def scheduler(
    *,
    running: Running = None,
    waiting: Waiting = None,
    full: Annotated[bool, typer.Option("--full", help="Also 4096 running.")] = False,
    as_json: options.Json = False,
) -> None:
    """Print what a step in which everybody decodes costs the scheduler, without any server."""
    flags: list[str] = []
    for flag, counts in (("--running", running), ("--waiting", waiting)):
        flags += [flag, *map(str, counts)] if counts else []
    run_bench("scheduler_svc.bench", flags + ["--full"] * full + ["--json"] * as_json)


@bench.command(epilog=EXIT_CODES_HELP)
@readable_errors
def link(
    *,
    step_ms: Annotated[
        list[float] | None, typer.Option(help="What a step takes, milliseconds; repeatable.")
    ] = None,
    rows: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests that decode; repeatable.")
    ] = None,
    window: Annotated[
        list[int] | None,
        typer.Option(min=1, max=16, help="Steps in flight; above 2: running ahead; repeatable."),
    ] = None,
    transport: Annotated[
        list[str] | None, typer.Option(help="unix or tcp, between the services; repeatable.")
    ] = None,
    clients: Annotated[
        list[int] | None, typer.Option(min=0, help="Streams that are read; repeatable.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="How long each is measured.")] = 1.0,
    full: Annotated[bool, typer.Option("--full", help="All combinations; minutes.")] = False,
    as_json: options.Json = False,
) -> None:
    """Print how long an executor waits for its scheduler, with steps that take a fixed time."""
    flags = ["link", "--seconds", str(seconds)]
    for flag, values in (
        ("--step-ms", step_ms),
        ("--rows", rows),
        ("--window", window),
        ("--transport", transport),
        ("--clients", clients),
    ):
        flags += [flag, *map(str, values)] if values else []
    run_bench("scheduler_svc.bench", flags + ["--full"] * full + ["--json"] * as_json)


@bench.command(epilog=EXIT_CODES_HELP)
@readable_errors
def stream(
    *,
    streams: Annotated[
        list[int] | None, typer.Option(min=1, help="Clients that are served; repeatable.")
    ] = None,
    frontends: Annotated[
        list[int] | None, typer.Option(min=1, help="Processes that serve them; repeatable.")
    ] = None,
    stalled: Annotated[
        list[int] | None, typer.Option(min=0, help="Clients that do not read; repeatable.")
    ] = None,
    step_ms: Annotated[
        float | None,
        typer.Option(min=0.01, help="What a step takes; default 1, more over 256 streams."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="How long each is measured.")] = 1.5,
    full: Annotated[bool, typer.Option("--full", help="More of them; minutes.")] = False,
    as_json: options.Json = False,
) -> None:
    """Print how many tokens reach how many clients, with steps that take a fixed short time."""
    flags = ["stream", "--seconds", str(seconds)]
    flags += [] if step_ms is None else ["--step-ms", str(step_ms)]
    for flag, values in (
        ("--streams", streams),
        ("--frontends", frontends),
        ("--stalled", stalled),
    ):
        flags += [flag, *map(str, values)] if values else []
    run_bench("scheduler_svc.bench", flags + ["--full"] * full + ["--json"] * as_json)


@bench.command(epilog=EXIT_CODES_HELP)
@readable_errors
def offline(
    *,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="tandem, transformers, transformers-generate, llama.cpp or linear-floor; "
            "repeatable. Default: all that are installed."
        ),
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Requests at once; repeatable. Default: 1, 8, 32."),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Of random weights: llama-135m (default), or another that bench model has."
        ),
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Instead: a model directory.")] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, or auto: as fast as the CPU can.")
    ] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Default: all cores.")] = None,
    input_len: InputLen = 128,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Medians are over so many.")] = 3,
    full: Annotated[bool, typer.Option("--full", help="1, 2, 4, 8, 16, 32 requests.")] = False,
    as_json: options.Json = False,
) -> None:
    """Compare whole engines on this CPU: same weights, threads and requests; takes minutes."""
    flags = ["offline", "--dtype", dtype, "--rounds", str(rounds)]
    flags += ["--input-len", str(input_len), "--output-len", str(output_len)]
    for flag, value in (("--shape", shape), ("--model", model), ("--threads", threads)):
        flags += [] if value is None else [flag, str(value)]
    for flag, values in (("--engine", engine), ("--concurrency", concurrency)):
        flags += [flag, *map(str, values)] if values else []
    run_bench("tandem_embedded.bench", flags + ["--full"] * full + ["--json"] * as_json)


def _report(outcomes: list[Outcomes], num_requests: int, title: str, *, as_json: bool) -> None:
    summary = summarize(outcomes)
    if as_json:
        typer.echo(json.dumps(summary))
    else:
        _print_table(summary, title)
    for reason, count in errors_by_reason(outcomes).items():
        typer.echo(f"{count} x {reason}", err=True)
    if summary["requests"] < num_requests:
        missing = num_requests - summary["requests"]
        typer.echo(f"time was up: {missing} of {num_requests} not answered", err=True)
    if summary["errors"] == summary["requests"]:
        raise fail("no request succeeded", ExitCode.FAILED)


def _print_table(summary: dict[str, Any], title: str) -> None:
    table = Table(title=title)
    for heading in ("", "p50", "p90", "p99"):
        table.add_column(heading, justify="left" if not heading else "right")
    names = {"ttft_ms": "first token, ms", "itl_ms": "next token, ms", "e2e_ms": "request, ms"}
    for key, name in names.items():
        cells = ["-" if value is None else f"{value:.1f}" for value in summary[key].values()]
        table.add_row(name, *cells)
    console = Console()
    console.print(table)
    console.print(
        f"{summary['output_tokens_per_s']:.1f} output tokens/s, "
        f"{summary['requests']} requests, {summary['errors']} errors",
        highlight=False,
    )
