"""`tandem batch`: completions of the prompts in a file, into another file."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import typer

from tandem.error_codes import PermissionDenied, TandemError, Unauthenticated, Unavailable
from tandem_client.channel import DEFAULT_ADDRESS, ChannelOptions
from tandem_client.cli.generation.inputs import (
    LogitBias,
    biases_of,
    lines_of,
    parsed,
    text_of_file,
)
from tandem_client.cli.generation.output import json_of
from tandem_client.cli.local_server.own_server import server_at
from tandem_client.cli.shared import options
from tandem_client.cli.shared.access import takes_access, used_with
from tandem_client.cli.shared.failures import ExitCode, fail, readable_errors
from tandem_client.cli.shared.request_options import REQUEST_OPTIONS, takes_request_options
from tandem_client.cli.shared.waiting import say
from tandem_client.client import Client
from tandem_client.many import DEFAULT_CONCURRENCY, Outcome
from tandem_client.params import GenerateOptions
from tandem_client.streams.retry import RetryPolicy

RETRY = RetryPolicy(max_attempts=30)
"""Retry policy of a batch: no one waits at the terminal, and a full queue empties."""

_OF_THE_SERVER = (Unavailable, Unauthenticated, PermissionDenied)
"""Errors that no prompt is to blame for: they end the batch, which can be run again."""

Source = Annotated[
    Path,
    typer.Argument(
        metavar="IN.jsonl",
        help='A line per request: a text, or an object with "prompt", "messages" or "token_ids", '
        'any options of a request and an "id"; - is stdin.',
    ),
]
Target = Annotated[
    Path,
    typer.Argument(
        metavar="OUT.jsonl",
        help='Lines with "id" and either "result" or "error", in the order of the input. Requests '
        "that are in it already are not sent again.",
    ),
]
RetryErrors = Annotated[
    bool,
    typer.Option("--retry-errors", help="Send requests again that are in OUT.jsonl with an error."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A line of the input: its id, which is the line's number if it gives none, and options."""

    request_id: str | int
    item: str | Mapping[str, Any]


@readable_errors
@takes_access
@takes_request_options(*REQUEST_OPTIONS, after="up")
def batch(
    *,
    channel: ChannelOptions,
    source: Source,
    target: Target,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, help="Most requests at once.")
    ] = DEFAULT_CONCURRENCY,
    retry_errors: RetryErrors = False,
    deadline_s: Annotated[
        float | None, typer.Option("--deadline-s", help="Seconds after which one request fails.")
    ] = None,
    logit_bias: LogitBias = None,
    address: options.Address = DEFAULT_ADDRESS,
    up: options.Up = None,
    **asked: object,
) -> None:
    """
    Complete the prompts of a file, several at a time, into another file.

    A batch that was broken off goes on when it is run again. Options of the command hold for
    requests that do not set them. The exit code is 1 if a request failed, and its error is in
    OUT.jsonl; a server that cannot be reached ends the batch instead.
    """
    arguments = cast(
        "GenerateOptions",
        {name: value for name, value in asked.items() if value is not None and value is not False},
    )
    if logit_bias:
        arguments["logit_bias"] = biases_of(logit_bias)
    requests = read_requests(source)
    with target.open("a+", encoding="utf-8", newline="\n") as output:
        done = read_done(output, target, retry_errors=retry_errors)
        todo = [request for request in requests if request.request_id not in done]
        failed: Counter[str] = Counter()
        with (
            server_at(address, up) as where,
            Client(where, retry=RETRY, options=used_with(channel, up)) as client,
            contextlib.closing(
                client.generate_many(
                    (request.item for request in todo),
                    concurrency=concurrency,
                    deadline_s=deadline_s,
                    **arguments,
                )
            ) as outcomes,
        ):
            for request, outcome in zip(todo, outcomes, strict=True):
                if isinstance(outcome, _OF_THE_SERVER):
                    raise outcome
                if isinstance(outcome, TandemError):
                    failed[outcome.reason] += 1
                _append(output, request, outcome)
    say(f"{len(todo) - failed.total()} done, {failed.total()} failed, {len(done)} were there")
    if failed:
        reasons = ", ".join(f"{count} {reason}" for reason, count in failed.most_common())
        raise fail(f"{failed.total()} of {len(todo)} requests failed: {reasons}", ExitCode.FAILED)


def read_requests(source: Path) -> list[Request]:
    """Read all requests of a file; end the command with the place of what is wrong."""
    requests: dict[str | int, Request] = {}
    for number, line in lines_of(text_of_file(source)):
        item = parsed(line, source, number)
        request_id: Any = number
        if isinstance(item, dict):
            request_id = item.pop("id", number)
        elif not isinstance(item, str):
            raise fail(f"{source}:{number} is neither a text nor an object", ExitCode.USAGE)
        if not isinstance(request_id, str | int):
            raise fail(f"{source}:{number} has an id that is no text or number", ExitCode.USAGE)
        if request_id in requests:
            raise fail(f"{source}:{number} has the id {request_id!r} again", ExitCode.USAGE)
        requests[request_id] = Request(request_id=request_id, item=item)
    return list(requests.values())


def read_done(output: TextIO, target: Path, *, retry_errors: bool) -> set[str | int]:
    """
    Return the ids of requests that need not be sent again, and make the file ready for more lines.
    """
    output.seek(0)
    text = output.read()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:  # the last line was being written when the batch was broken off
        output.seek(0)
        output.truncate(len(whole.encode()))
    lines = [parsed(line, target, number) for number, line in lines_of(whole)]
    if not all(isinstance(line, dict) and "id" in line for line in lines):
        raise fail(f"{target} is no output of tandem batch: name another file", ExitCode.USAGE)
    return {line["id"] for line in lines if "result" in line or not retry_errors}


def _append(output: TextIO, request: Request, outcome: Outcome) -> None:
    """Write the line of one request, for good."""
    said: dict[str, Any]
    if isinstance(outcome, TandemError):
        error = {"reason": outcome.reason, "code": outcome.code, "message": outcome.message}
        said = {"error": {**error, "field": outcome.field, "metadata": outcome.metadata}}
    else:
        said = {"result": json_of(outcome)}
    output.write(json.dumps({"id": request.request_id, **said}) + "\n")
    output.flush()
