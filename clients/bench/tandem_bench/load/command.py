"""`tandem bench serve [flags]`: load test of a running server, as its clients measure it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.main import get_command

from tandem_bench.load.processes import run_tasks
from tandem_bench.load.report import errors_by_reason, summarize
from tandem_bench.load.worker import Outcomes, Task, sent_access
from tandem_bench.load.workload import Workload, read_prompts
from tandem_client.channel import DEFAULT_ADDRESS, ChannelOptions
from tandem_client.cli.shared import options
from tandem_client.cli.shared.access import takes_access
from tandem_client.cli.shared.exit_codes import EXIT_CODES_HELP, ExitCode
from tandem_client.cli.shared.failures import fail, readable_errors
from tandem_client.cli.shared.help_texts import hide_switch_types
from tandem_client.cli.shared.waiting import Waits, no_answer
from tandem_client.client import Client

DEFAULT_REQUESTS = 64

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
    int,
    typer.Option(
        min=1, help="Output tokens per request; with --prompts, the most where a line sets none."
    ),
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
AsBatch = Annotated[
    bool,
    typer.Option(
        "--batch",
        help="Send the requests of each process as items of one GenerateBatch call, which costs "
        "less than calls of their own; those beyond the server's limit of items get such calls.",
    ),
]


@readable_errors
@takes_access
def serve(
    *,
    channel: ChannelOptions,
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
    as_batch: AsBatch = False,
    as_json: options.Json = False,
) -> None:
    """Send requests from as many processes as asked, and print latencies and throughput."""
    with (
        Client(address, retry=options.RETRY, options=channel) as client,
        Waits(no_answer(address)),
    ):
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
                as_batch=as_batch,
                access=sent_access(channel),
            )
            for index in range(processes)
        ]
    )
    _report(outcomes, workload.num_requests, f"{model.name} at {address}", as_json=as_json)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(epilog=EXIT_CODES_HELP)(serve)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; end with SystemExit, as commands of `tandem` do."""
    command = get_command(app)
    hide_switch_types(command)
    command(None if arguments is None else list(arguments), prog_name="tandem bench serve")
    return 0


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
