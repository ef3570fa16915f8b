"""`tandem generate`: one completion to the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated, cast

import typer

from tandem_client.channel import DEFAULT_ADDRESS
from tandem_client.cli.generation.output import collect, json_of, write_stream
from tandem_client.cli.local_server.own_server import server_at
from tandem_client.cli.shared import options
from tandem_client.cli.shared.failures import ExitCode, fail, readable_errors
from tandem_client.cli.shared.request_options import REQUEST_OPTIONS, takes_request_options
from tandem_client.cli.shared.screen import write
from tandem_client.cli.shared.waiting import Waits, no_answer, say, told
from tandem_client.client import Client
from tandem_client.params import BOTH_CHANGED, GenerateOptions, changes_both

Prompt = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PROMPT",
        help="Text to continue; - or no prompt reads it from stdin, PROMPT - both.",
        show_default=False,
    ),
]
Deadline = Annotated[
    float | None, typer.Option("--deadline-s", help="Seconds after which the command fails.")
]


@readable_errors
@takes_request_options(*REQUEST_OPTIONS, after="up")
def generate(
    *,
    prompt: Prompt = None,
    token_ids: options.TokenIds = None,
    address: options.Address = DEFAULT_ADDRESS,
    up: options.Up = None,
    deadline_s: Deadline = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Send the prompt as a user message, through the model's chat template."
        ),
    ] = False,
    echo: Annotated[
        bool, typer.Option("--echo", help="Print the prompt before its continuation.")
    ] = False,
    as_json: options.Json = False,
    **asked: object,
) -> None:
    """
    Continue a prompt, and print the text as it comes.

    Several completions (--n) are printed one after the other, once all of them have ended.
    """
    arguments = cast(
        "GenerateOptions",
        {name: value for name, value in asked.items() if value is not None and value is not False},
    )
    text = None
    if token_ids is None:
        text = _prompt_of(prompt or [])
        if chat:
            arguments["messages"] = [{"role": "user", "content": text}]
    elif prompt or chat or echo:
        raise fail("--token-ids stands instead of a prompt, --chat and --echo", ExitCode.USAGE)
    else:
        arguments["token_ids"] = _ids_of(token_ids)
    if changes_both(arguments):
        say(BOTH_CHANGED)
    with (
        server_at(address, up) as where,
        Client(where, retry=options.stream_retry(up)) as client,
        client.generate(None if chat else text, deadline_s=deadline_s, **arguments) as stream,
    ):
        events = told(stream, where)
        if as_json:
            typer.echo(json.dumps(json_of(collect(stream, events))))
            return
        if echo:
            write(text or "")
        several = (arguments.get("n") or 1) > 1
        write_stream(
            stream,
            events,
            several=several,
            with_logprobs="logprobs" in arguments,
            as_ids=token_ids is not None and not _has_text(client, where, deadline_s),
        )


def _prompt_of(arguments: Sequence[str]) -> str:
    """Return the prompt, joined with the text of stdin if that is asked for."""
    if len(arguments) > 2 or (len(arguments) == 2 and arguments[1] != "-"):
        raise fail('give one prompt, in quotation marks: tandem generate "..."', ExitCode.USAGE)
    if not arguments and sys.stdin.isatty():
        raise fail('give a prompt: tandem generate "..."', ExitCode.USAGE)
    if not arguments:
        return sys.stdin.read()
    return "\n\n".join(sys.stdin.read() if one == "-" else one for one in arguments)


def _ids_of(text: str) -> list[int]:
    """Parse token ids that are separated by commas."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        line = f"--token-ids takes whole numbers with commas between them, as 1,2,3, got {text!r}"
        raise fail(line, ExitCode.USAGE) from None


def _has_text(client: Client, address: str, deadline_s: float | None) -> bool:
    """Ask the server, and return True if the outputs of its model have text."""
    with Waits(no_answer(address)):
        return not client.get_model(deadline_s=deadline_s).token_ids_only
