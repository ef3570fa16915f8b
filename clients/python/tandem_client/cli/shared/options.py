"""Options and retry policies that several commands share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tandem.errors import Draining, ExecutorLost, HandedOver, TandemError
from tandem.status import PeerUnavailable
from tandem_client.channel import ADDRESS_VARIABLE, ADMIN_ADDRESS_VARIABLE
from tandem_client.cli.shared.screen import remark
from tandem_client.streams.retry import RetryPolicy

RETRY = RetryPolicy(max_attempts=3, resume_within_s=60.0)
"""Retry policy of commands, which gives up soon because a user waits at the terminal."""


_BREAKS: dict[type[TandemError], str] = {
    Draining: "the server is stopping",
    HandedOver: "the server is stopping",
    PeerUnavailable: "the connection broke",
    ExecutorLost: "the server lost its executor",
}
"""Texts for the errors that break a stream; other errors are shown by their reason."""


def stream_retry(up: Path | None) -> RetryPolicy:
    """
    Return RETRY for streams, with a remark on the terminal when one breaks, once per reason.
    Without `resume` if the server runs for this command alone: it has no successor to wait for.
    """
    if up is not None:
        return replace(RETRY, resume=False)
    told: set[str] = set()

    def tell(error: TandemError, wait_s: float) -> None:
        del wait_s
        if error.reason not in told:
            told.add(error.reason)
            why = _BREAKS.get(type(error), error.reason)
            limit = f"for up to {RETRY.resume_within_s:g} s"
            remark(f"[{why}: looking for a server to go on, {limit}]")

    return replace(RETRY, on_break=tell)


TokenIds = Annotated[
    str | None,
    typer.Option(
        "--token-ids",
        metavar="ID,ID,...",
        help="Token ids to continue instead of text; of a model without a tokenizer the output is "
        "printed as ids, too.",
    ),
]
Address = Annotated[
    str,
    typer.Option(
        "--address",
        envvar=["TANDEM_CLIENT_ADDRESS", ADDRESS_VARIABLE],
        metavar="HOST:PORT",
        help="Address of the server.",
    ),
]
AdminAddress = Annotated[
    str,
    typer.Option(
        "--admin-address",
        envvar=["TANDEM_CLIENT_ADMIN_ADDRESS", ADMIN_ADDRESS_VARIABLE],
        metavar="HOST:PORT",
        help="Address of the server's port for operators.",
    ),
]
Up = Annotated[
    Path | None,
    typer.Option(
        "--up",
        metavar="MODEL_DIR",
        help="Start a server with this model, on free ports, for this command alone.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
