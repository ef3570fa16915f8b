"""`tandem generate`: one completion to the terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem_client.channel import DEFAULT_ADDRESS
from tandem_client.cli import options
from tandem_client.cli.failures import fail, readable_errors
from tandem_client.cli.services import LocalServer, ServiceFailed, local_server
from tandem_client.client import Client
from tandem_client.events import Completion, Delta
from tandem_client.request import GenerateOptions
from tandem_client.stream import GenerationStream


@contextlib.contextmanager
def server_at(address: str, up: Path | None) -> Iterator[str]:
    """Yield the address to talk to: the one given, or that of a server for this command alone."""
    if up is None:
        yield address
        return
    started_s = time.monotonic()
    plan = LocalServer(
        executor_arguments=["--model", str(up)],
        scheduler_arguments=["--listen", "127.0.0.1:0", "--admin-listen=", "--metrics-listen="],
    )
    try:
        with local_server(plan, _say) as server:
            _say(f"ready at {server.address} after {time.monotonic() - started_s:.1f} s")
            yield server.address
    except ServiceFailed as failure:
        raise fail(failure.line, failure.code) from None


@readable_errors
def generate(
    *,
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from stdin.")],
    address: options.Address = DEFAULT_ADDRESS,
    up: options.Up = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    time_limit_s: options.TimeLimit = None,
    deadline_s: Annotated[
        float | None, typer.Option("--deadline-s", help="Fail after so many seconds.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's turn of a conversation.")
    ] = False,
    echo: Annotated[
        bool, typer.Option("--echo", help="Print the prompt before its continuation.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Continue a prompt, printing the text as it comes."""
    text = sys.stdin.read() if prompt == "-" else prompt
    arguments = GenerateOptions(
        messages=[{"role": "user", "content": text}] if chat else None,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos or None,
        time_limit_s=time_limit_s,
    )
    with (
        server_at(address, up) as where,
        Client(where, retry=options.RETRY) as client,
        client.generate(None if chat else text, deadline_s=deadline_s, **arguments) as stream,
    ):
        if as_json:
            typer.echo(json.dumps(_as_json(collect(stream))))
            return
        if echo:
            _write(text)
        for piece in stream.text:
            _write(piece)
        _write("\n")
        _say(summary(stream))


def collect(stream: GenerationStream) -> Completion:
    """Read a stream to its end."""
    token_ids: list[int] = []
    text = ""
    for event in stream:
        if isinstance(event, Delta):
            token_ids += event.token_ids
            text += event.text
    started, finished, done = stream.started, stream.finished, stream.done
    assert started is not None
    assert finished is not None
    assert done is not None
    return Completion(
        request_id=started.request_id,
        text=text,
        token_ids=tuple(token_ids),
        reason=finished.reason,
        matched=finished.matched,
        params=started.params,
        model_revision=started.model_revision,
        usage=done.usage,
        timings=done.timings,
    )


def summary(stream: GenerationStream) -> str:
    """One line about a stream that ended."""
    finished, done = stream.finished, stream.done
    if finished is None or done is None:
        return "stopped"
    usage, timings = done.usage, done.timings
    parts = [f"{usage.prompt_tokens} prompt + {usage.output_tokens} output tokens"]
    if usage.output_tokens > 0:
        parts.append(f"first after {timings.time_to_first_token_s * 1000:.0f} ms")
    decode_s = timings.total_s - timings.time_to_first_token_s
    if usage.output_tokens > 1 and decode_s > 0:
        parts.append(f"then {(usage.output_tokens - 1) / decode_s:.0f}/s")
    return f"{', '.join(parts)}; ended by {finished.reason.name}"


def _as_json(completion: Completion) -> dict[str, Any]:
    content = dataclasses.asdict(completion)
    content["reason"] = completion.reason.name
    return content


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(line: str) -> None:
    typer.secho(f"[{line}]", err=True, dim=True)
