"""`tandem profile`: where the time of a running server's steps goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem_client.admin import AdminClient
from tandem_client.channel import DEFAULT_ADMIN_ADDRESS
from tandem_client.cli import options
from tandem_client.cli.failures import ExitCode, fail, readable_errors
from tandem_client.profile import ProfileProgress


@readable_errors
def profile(
    *,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="File to write the trace to (gzipped Chrome JSON)."),
    ] = Path("trace.json.gz"),
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", help="Steps to record, 1 to 100, or to 20 with stacks.", show_default="20"
        ),
    ] = None,
    duration_s: Annotated[
        float | None,
        typer.Option(
            "--duration-s",
            help="Seconds after which to end with what there is, at most 60.",
            show_default="10",
        ),
    ] = None,
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
    with AdminClient(address, retry=options.RETRY) as admin:
        recorded = admin.profile(
            num_steps=steps,
            duration_s=duration_s,
            with_stack=with_stack,
            record_shapes=record_shapes,
            on_progress=_say,
        )
    try:
        output.write_bytes(recorded.trace)
    except OSError as error:
        raise fail(f"{output}: the trace cannot be written: {error.strerror}") from error
    typer.echo(
        f"{output}: {recorded.num_steps} steps in {recorded.elapsed_s:.1f} s, "
        f"{len(recorded.trace) / 2**20:.1f} MiB"
    )
    if not recorded.num_steps:
        typer.echo("no step was computed meanwhile: send requests while it records", err=True)


def _say(progress: ProfileProgress) -> None:
    doing = "writing the trace" if progress.is_recorded else "recording"
    typer.echo(f"{doing}: {progress.num_steps} steps, {progress.elapsed_s:.1f} s", err=True)
