"""`tandem bench`: measure a running server, or its parts alone."""

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
from tandem_client.cli.waiting import Waits, no_answer
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
    int | None,
    typer.Option(min=1, help="Number of requests; default: 64, or each prompt of the file once."),
]
Concurrency = Annotated[
    int, typer.Option(min=1, help="Requests in flight at once, over all processes.")
]
Processes = Annotated[int, typer.Option(min=1, help="Number of processes that send requests.")]
InputLen = Annotated[int, typer.Option(min=1, help="Tokens of each random prompt.")]
OutputLen = Annotated[
    int, typer.Option(min=1, help="Output tokens per request; with --prompts, the most.")
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        help='File of JSON lines with "prompt", "messages" or "token_ids" to send instead.'
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the random prompts.")]
Temperature = Annotated[float, typer.Option(help="Temperature of every request.")]
WarmUp = Annotated[
    int, typer.Option(min=0, help="Short requests that each process sends first, not counted.")
]
MaxTime = Annotated[
    float,
    typer.Option(help="Seconds after which no request starts; five later, all are cancelled."),
]
Running = Annotated[
    list[int] | None,
    typer.Option(
        min=1, help="Number of requests that decode; repeatable. Default: 1, 32, 128, 256, 1024."
    ),
]
Waiting = Annotated[
    list[int] | None,
    typer.Option(min=0, help="Number of requests that wait; repeatable. Default: 0, 500, 5000."),
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
    with Client(address, retry=options.RETRY) as client, Waits(no_answer(address)):
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
    full: Annotated[
        bool, typer.Option("--full", help="Also measure 4096 running requests.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Print what a decode-only step costs the scheduler; needs no server."""
    flags = ["scheduler"]
    for flag, counts in (("--running", running), ("--waiting", waiting)):
        flags += [flag, *map(str, counts)] if counts else []
    run_bench(flags + ["--full"] * full + ["--json"] * as_json)


@bench.command(epilog=EXIT_CODES_HELP)
@readable_errors
def link(
    *,
    step_ms: Annotated[
        list[float] | None, typer.Option(help="Duration of a step in milliseconds; repeatable.")
    ] = None,
    rows: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of requests that decode; repeatable.")
    ] = None,
    window: Annotated[
        list[int] | None,
        typer.Option(min=1, max=16, help="Number of steps in flight; repeatable."),
    ] = None,
    transport: Annotated[
        list[str] | None,
        typer.Option(help="Transport between the services, unix or tcp; repeatable."),
    ] = None,
    clients: Annotated[
        list[int] | None, typer.Option(min=0, help="Number of client streams; repeatable.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.01, help="Seconds that each combination is measured.")
    ] = 1.0,
    full: Annotated[
        bool, typer.Option("--full", help="Measure all combinations; takes minutes.")
    ] = False,
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
    run_bench(flags + ["--full"] * full + ["--json"] * as_json)


@bench.command(epilog=EXIT_CODES_HELP)
@readable_errors
def stream(
    *,
    streams: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of clients that read; repeatable.")
    ] = None,
    frontends: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of frontend processes; repeatable.")
    ] = None,
    stalled: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Number of clients that do not read; repeatable."),
    ] = None,
    step_ms: Annotated[
        float | None,
        typer.Option(min=0.01, help="Duration of a step; default 1, longer over 256 streams."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.01, help="Seconds that each combination is measured.")
    ] = 1.5,
    full: Annotated[
        bool, typer.Option("--full", help="Measure more combinations; takes minutes.")
    ] = False,
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
    run_bench(flags + ["--full"] * full + ["--json"] * as_json)


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
        typer.Option(min=1, help="Number of requests at once; repeatable. Default: 1, 8, 32."),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Shape of the random weights: llama-135m (default) or another one of bench model."
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Model directory to use instead of random weights.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, or auto: the faster one on this CPU.")
    ] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of each engine; default: all cores.")
    ] = None,
    input_len: InputLen = 128,
    output_len: Annotated[int, typer.Option(min=2, help="Output tokens per request.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; medians are printed.")] = 3,
    full: Annotated[
        bool, typer.Option("--full", help="Measure 1, 2, 4, 8, 16 and 32 requests.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Compare whole engines on this CPU: same weights, threads and requests; takes minutes."""
    flags = ["offline", "--dtype", dtype, "--rounds", str(rounds)]
    flags += ["--input-len", str(input_len), "--output-len", str(output_len)]
    for flag, value in (("--shape", shape), ("--model", model), ("--threads", threads)):
        flags += [] if value is None else [flag, str(value)]
    for flag, values in (("--engine", engine), ("--concurrency", concurrency)):
        flags += [flag, *map(str, values)] if values else []
    run_bench(flags + ["--full"] * full + ["--json"] * as_json)


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
