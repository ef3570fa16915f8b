"""`tandem bench`: measure a running server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tandem_client.channel import DEFAULT_ADDRESS
from tandem_client.cli import options
from tandem_client.cli.failures import EXIT_CODES_HELP, ExitCode, fail, readable_errors
from tandem_client.client import Client
from tandem_client.load.processes import run_tasks
from tandem_client.load.report import errors_by_reason, summarize
from tandem_client.load.worker import Task
from tandem_client.load.workload import Workload, read_prompts

DEFAULT_REQUESTS = 64

bench = typer.Typer(help="Measure a running server.", no_args_is_help=True)


@bench.callback()
def _bench() -> None:
    pass


@bench.command(epilog=EXIT_CODES_HELP)
@readable_errors
def serve(
    *,
    address: options.Address = DEFAULT_ADDRESS,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="How many; default: 64, or each prompt of the file once."),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="How many at once, over all.")] = 16,
    processes: Annotated[int, typer.Option(min=1, help="Processes that send them.")] = 1,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens per random prompt.")] = 64,
    output_len: Annotated[
        int, typer.Option(min=1, help="Tokens per answer; with --prompts, the most.")
    ] = 64,
    prompts: Annotated[
        Path | None,
        typer.Option(help='JSON lines with "prompt", "messages" or "token_ids", instead.'),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random prompts.")] = 0,
    temperature: Annotated[float, typer.Option(help="Of every request.")] = 0.0,
    warm_up: Annotated[
        int, typer.Option(min=0, help="Short requests per process that count nowhere.")
    ] = 4,
    max_time_s: Annotated[
        float, typer.Option(help="Start no request after this; five seconds later all is cut off.")
    ] = 30.0,
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
    summary = summarize(outcomes)
    if as_json:
        typer.echo(json.dumps(summary))
    else:
        _print_table(summary, title=f"{model.name} at {address}, {concurrency} at once")
    reasons = errors_by_reason(outcomes)
    for reason, count in reasons.items():
        typer.echo(f"{count} x {reason}", err=True)
    if summary["requests"] < workload.num_requests:
        missing = workload.num_requests - summary["requests"]
        typer.echo(f"time was up: {missing} of {workload.num_requests} not answered", err=True)
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
