"""`tandem generate`: one completion to the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import typer

from tandem_client.channel import DEFAULT_ADDRESS
from tandem_client.cli.generation.output import collect, json_of, with_ids, write_stream
from tandem_client.cli.local_server.own_server import server_at
from tandem_client.cli.shared import options
from tandem_client.cli.shared.failures import ExitCode, fail, readable_errors
from tandem_client.cli.shared.screen import write
from tandem_client.cli.shared.waiting import Waits, no_answer, say, told
from tandem_client.client import Client
from tandem_client.request import BOTH_CHANGED, GenerateOptions, changes_both

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
def generate(
    *,
    prompt: Prompt = None,
    token_ids: options.TokenIds = None,
    address: options.Address = DEFAULT_ADDRESS,
    up: options.Up = None,
    max_tokens: options.MaxTokens = None,
    min_tokens: options.MinTokens = None,
    preset: options.Preset = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    seed: options.Seed = None,
    logprobs: options.Logprobs = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    time_limit_s: options.TimeLimit = None,
    n: options.Choices = None,
    priority: options.Priority = None,
    tenant: options.Tenant = None,
    cache_salt: options.CacheSalt = None,
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
) -> None:
    """
    Continue a prompt, and print the text as it comes.

    Several completions (--n) are printed one after the other, once all of them have ended.
    """
    text, arguments = _asked(locals())
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
        if token_ids is not None and not _has_text(client, where, deadline_s):
            events = with_ids(events)
        if echo:
            write(text or "")
        write_stream(stream, events, several=(n or 1) > 1, with_logprobs=logprobs is not None)


def _asked(given: Mapping[str, Any]) -> tuple[str | None, GenerateOptions]:
    """Return the prompt, or None if token ids are given, and the options of the request."""
    prompt, arguments = given["prompt"] or [], _request_options(given)
    if given["token_ids"] is not None:
        if prompt or given["chat"] or given["echo"]:
            raise fail("--token-ids stands instead of a prompt, --chat and --echo", ExitCode.USAGE)
        arguments["token_ids"] = _ids_of(given["token_ids"])
        return None, arguments
    text = _prompt_of(prompt)
    if given["chat"]:
        arguments["messages"] = [{"role": "user", "content": text}]
    return text, arguments


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


def _request_options(given: Mapping[str, Any]) -> GenerateOptions:
    """Return the arguments of a command that are options of a request, by name."""
    names = GenerateOptions.__annotations__
    asked = {
        name: value
        for name, value in given.items()
        if name in names and value is not None and value is not False
    }
    return cast("GenerateOptions", asked)
