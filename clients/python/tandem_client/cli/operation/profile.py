"""`tandem profile`: a trace of the executor's steps on a running server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.wording import counted
from tandem_client.admin import AdminClient
from tandem_client.admin.profile import ProfileProgress
from tandem_client.channel import DEFAULT_ADMIN_ADDRESS, ChannelOptions
from tandem_client.cli.shared import options
from tandem_client.cli.shared.access import takes_access
from tandem_client.cli.shared.failures import ExitCode, fail, readable_errors
from tandem_client.cli.shared.waiting import Waits, no_answer

PATIENCE_S = 0.5
"""Seconds without a first step after which the command says that it waits for requests."""


Output = Annotated[
    Path,
    typer.Option("--output", "-o", help="File to write the trace to (gzipped Chrome JSON)."),
]
Steps = Annotated[
    int | None,
    typer.Option(
        "--steps",
        help="Steps to record, 1 to 100; with --with-stack at most 20.",
        show_default="20",
    ),
]
Duration = Annotated[
    float | None,
    typer.Option(
        "--duration-s",
        help="Seconds after which the recording ends, at most 60.",
        show_default="10",
    ),
]


@readable_errors
@takes_access
def profile(
    *,
    channel: ChannelOptions,
    output: Output = Path("trace.json.gz"),
    steps: Steps = None,
    duration_s: Duration = None,
    with_stack: Annotated[
        bool, typer.Option("--with-stack", help="Record Python functions too; slow.")
    ] = False,
    record_shapes: Annotated[
        bool, typer.Option("--record-shapes", help="Record shapes of what operations work on.")
    ] = False,
    address: options.AdminAddress = DEFAULT_ADMIN_ADDRESS,
) -> None:
    """
    Record a trace of the executor's next steps.

    Requests must run meanwhile. Open the file in ui.perfetto.dev or chrome://tracing.
    """
    if not output.parent.is_dir():
        raise fail(f"{output}: there is no folder {output.parent}", ExitCode.USAGE)
    if output.is_dir():
        raise fail(f"{output} is a folder: give a file's name", ExitCode.USAGE)
    progress = ProgressPrinter()
    with (
        AdminClient(address, retry=options.RETRY, options=channel) as admin,
        Waits(no_answer(address)) as waits,
    ):

        def tell(news: ProfileProgress) -> None:
            waits.now_for("recording")
            progress.tell(news)

        recorded = admin.profile(
            num_steps=steps,
            duration_s=duration_s,
            with_stack=with_stack,
            record_shapes=record_shapes,
            on_progress=tell,
        )
    if not recorded.num_steps:
        raise fail(
            f"nothing was recorded: no step ran in {recorded.elapsed_s:.1f} s. Send requests "
            "while it records"
        )
    try:
        output.write_bytes(recorded.trace)
    except OSError as error:
        raise fail(f"{output}: the trace cannot be written: {error.strerror}") from error
    typer.echo(
        f"{output}: {counted(recorded.num_steps, 'step')} in {recorded.elapsed_s:.1f} s, "
        f"{len(recorded.trace) / 2**20:.1f} MiB"
    )


class ProgressPrinter:
    """Printer of a recording's progress; it prints no line twice in a row."""

    def __init__(self) -> None:
        self._last_said = ""

    def tell(self, progress: ProfileProgress) -> None:
        """Print a line on stderr if it differs from the last one."""
        if progress.is_recorded and progress.num_steps:
            line = f"writing the trace of {counted(progress.num_steps, 'step')}"
        elif progress.num_steps:
            line = f"recording: {counted(progress.num_steps, 'step')}"
        elif not progress.is_recorded and progress.elapsed_s >= PATIENCE_S:
            line = "no step has run yet: send requests"
        else:
            return
        if line != self._last_said:
            self._last_said = line
            typer.echo(line, err=True)
