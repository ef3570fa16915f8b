"""`tandem generate`: one completion to the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast

import typer

from tandem_client.channel import DEFAULT_ADDRESS, ChannelOptions
from tandem_client.cli.generation.inputs import (
    LogitBias,
    biases_of,
    ids_of,
    messages_of,
    prompt_of,
)
from tandem_client.cli.generation.output import (
    collect,
    event_json,
    json_of,
    with_prompt_shown,
    write_stream,
)
from tandem_client.cli.local_server.own_server import server_at
from tandem_client.cli.shared import options
from tandem_client.cli.shared.access import takes_access, used_with
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
Messages = Annotated[
    Path | None,
    typer.Option(
        "--messages",
        metavar="FILE",
        help="Conversation to answer: a JSON list of messages, or one per line; - is stdin.",
    ),
]
AsLines = Annotated[
    bool, typer.Option("--ndjson", help="Print each event as a line of JSON, as it comes.")
]
Deadline = Annotated[
    float | None, typer.Option("--deadline-s", help="Seconds after which the command fails.")
]


@readable_errors
@takes_access
@takes_request_options(*REQUEST_OPTIONS, after="up")
def generate(
    *,
    channel: ChannelOptions,
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
    messages: Messages = None,
    logit_bias: LogitBias = None,
    as_json: options.Json = False,
    as_lines: AsLines = False,
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
    if logit_bias:
        arguments["logit_bias"] = biases_of(logit_bias)
    text = _set_prompt(arguments, prompt or [], token_ids, messages, is_chat=chat, is_echo=echo)
    if changes_both(arguments):
        say(BOTH_CHANGED)
    with (
        server_at(address, up) as where,
        Client(where, retry=options.stream_retry(up), options=used_with(channel, up)) as client,
        client.generate(text, deadline_s=deadline_s, **arguments) as stream,
    ):
        if as_lines:
            for event in stream:
                write(f"{json.dumps(event_json(event))}\n")
            return
        events = told(stream, where)
        if as_json:
            typer.echo(json.dumps(json_of(collect(stream, events))))
            return
        if echo:
            write(text or "")
        write_stream(
            stream,
            with_prompt_shown(events),
            several=(arguments.get("n") or 1) > 1,
            with_logprobs="logprobs" in arguments,
            as_ids=token_ids is not None and not _has_text(client, where, deadline_s),
        )


def _set_prompt(
    arguments: GenerateOptions,
    prompt: Sequence[str],
    token_ids: str | None,
    messages: Path | None,
    *,
    is_chat: bool,
    is_echo: bool,
) -> str | None:
    """Set what the request generates from, or return its text if it is a plain prompt."""
    if is_echo and "prompt_logprobs" in arguments:
        line = "--prompt-logprobs prints the prompt by itself: leave out --echo"
        raise fail(line, ExitCode.USAGE)
    if token_ids is not None and (prompt or is_chat or is_echo or messages):
        line = "--token-ids stands instead of a prompt, --messages, --chat and --echo"
        raise fail(line, ExitCode.USAGE)
    if messages is not None and (prompt or is_chat or is_echo):
        raise fail("--messages stands instead of a prompt, --chat and --echo", ExitCode.USAGE)
    if token_ids is not None:
        arguments["token_ids"] = ids_of(token_ids)
    elif messages is not None:
        arguments["messages"] = messages_of(messages)
    else:
        text = prompt_of(prompt)
        if not is_chat:
            return text
        arguments["messages"] = [{"role": "user", "content": text}]
    return None


def _has_text(client: Client, address: str, deadline_s: float | None) -> bool:
    """Ask the server, and return True if the outputs of its model have text."""
    with Waits(no_answer(address)):
        return client.get_model(deadline_s=deadline_s).capabilities.text
