"""`tandem generate`: one completion to the terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from tandem_client.channel import DEFAULT_ADDRESS
from tandem_client.cli.local_server.services import LocalServer, ServiceFailed, local_server
from tandem_client.cli.shared import options
from tandem_client.cli.shared.failures import ExitCode, fail, readable_errors
from tandem_client.cli.shared.screen import write
from tandem_client.cli.shared.waiting import Waits, no_answer, say, told
from tandem_client.client import Client
from tandem_client.events import Choice, Completion, Delta, Event, TokenLogprobs, completion_of
from tandem_client.request import BOTH_CHANGED, GenerateOptions, changes_both
from tandem_client.stream import GenerationStream


@contextlib.contextmanager
def server_at(address: str, up: Path | None) -> Iterator[str]:
    """Yield `address`, or, with `up`, the address of a server for this command alone."""
    if up is None:
        yield address
        return
    started_s = time.monotonic()
    plan = LocalServer(
        executor_arguments=["--model", str(up)],
        scheduler_arguments=["--listen", "127.0.0.1:0", "--admin-listen=", "--metrics-listen="],
    )
    try:
        with local_server(plan, say) as server:
            say(f"ready at {server.address} after {time.monotonic() - started_s:.1f} s")
            yield server.address
    except ServiceFailed as failure:
        raise fail(failure.line, failure.code) from None


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
            typer.echo(json.dumps(_as_json(collect(stream, events))))
            return
        if token_ids is not None and not _has_text(client, where, deadline_s):
            events = with_ids(events)
        if echo:
            write(text or "")
        _write_stream(stream, events, several=(n or 1) > 1, with_logprobs=logprobs is not None)


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


def with_ids(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events, with the ids of each output as its text, separated by spaces."""
    begun: set[int] = set()
    for event in events:
        if isinstance(event, Delta):
            words = ([""] if event.choice in begun else []) + [str(one) for one in event.token_ids]
            begun.add(event.choice)
            yield dataclasses.replace(event, text=" ".join(words))
        else:
            yield event


def _request_options(given: Mapping[str, Any]) -> GenerateOptions:
    """Return the arguments of a command that are options of a request, by name."""
    names = GenerateOptions.__annotations__
    asked = {
        name: value
        for name, value in given.items()
        if name in names and value is not None and value is not False
    }
    return cast("GenerateOptions", asked)


def collect(stream: GenerationStream, events: Iterable[Event]) -> Completion:
    """Read the events of a stream to its end, and return the whole completion."""
    token_ids: dict[int, list[int]] = {}
    logprobs: dict[int, list[TokenLogprobs]] = {}
    texts: dict[int, str] = {}
    for event in events:
        if isinstance(event, Delta):
            token_ids.setdefault(event.choice, []).extend(event.token_ids)
            logprobs.setdefault(event.choice, []).extend(event.logprobs)
            texts[event.choice] = texts.get(event.choice, "") + event.text
    assert stream.started is not None
    assert stream.done is not None
    choices = tuple(
        Choice(
            choice=choice,
            text=texts.get(choice, ""),
            token_ids=tuple(token_ids.get(choice, ())),
            reason=finished.reason,
            matched=finished.matched,
            logprobs=tuple(logprobs.get(choice, ())),
        )
        for choice, finished in sorted(stream.finished_choices.items())
    )
    return completion_of(stream.started, choices, stream.done)


def text_of(events: Iterable[Event]) -> Iterator[str]:
    """Yield the new text of each delta of choice 0 that has text."""
    for event in events:
        if isinstance(event, Delta) and event.choice == 0 and event.text:
            yield event.text


def summary(stream: GenerationStream) -> str:
    """Return one line about a stream that ended."""
    done, ends = stream.done, stream.finished_choices
    if done is None:
        return "stopped"
    usage, timings = done.usage, done.timings
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    parts = [f"{usage.prompt_tokens} prompt{cached} + {usage.output_tokens} output tokens"]
    if stream.started is not None and stream.started.truncated_prompt_tokens:
        parts.append(f"{stream.started.truncated_prompt_tokens} older prompt tokens dropped")
    if usage.output_tokens > 0:
        parts.append(f"first after {timings.time_to_first_token_s * 1000:.0f} ms")
    decode_s = timings.total_s - timings.time_to_first_token_s
    if usage.output_tokens > 1 and decode_s > 0:
        parts.append(f"then {(usage.output_tokens - 1) / decode_s:.0f}/s")
    reasons = dict.fromkeys(ends[choice].reason.name for choice in sorted(ends))
    return f"{', '.join(parts)}; ended by {', '.join(reasons)}"


def _write_stream(
    stream: GenerationStream, events: Iterable[Event], *, several: bool, with_logprobs: bool
) -> None:
    if several:
        for one in collect(stream, events).choices:
            write(f"--- choice {one.choice}, {one.reason.name}\n{one.text}\n")
            for line in [LOGPROBS_HEADER] * with_logprobs + logprob_lines(
                one.token_ids, one.logprobs
            ):
                write(f"{line}\n")
    elif with_logprobs:
        header = [LOGPROBS_HEADER]
        for event in events:
            if isinstance(event, Delta):
                lines = header + logprob_lines(event.token_ids, event.logprobs)
                write("".join(f"{line}\n" for line in lines))
                header = []
    else:
        for piece in text_of(events):
            write(piece)
        write("\n")
    say(summary(stream))


LOGPROBS_HEADER = "   token   logprob   share  text          likeliest: token text logprob"


def logprob_lines(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[str]:
    """Return a line per token: id, log probability, share, text, and the likeliest ids likewise."""
    return [
        f"{token_id:>8} {one.logprob:9.4f} {math.exp(one.logprob):7.2%}  {_quoted(one.text):<13} "
        + "  ".join(_alternatives(one))
        for token_id, one in zip(token_ids, logprobs, strict=False)
    ]


def _alternatives(one: TokenLogprobs) -> list[str]:
    texts = one.top_texts or ("",) * len(one.top)  # an older server sends no texts
    return [
        f"{token_id} {_quoted(text)} {logprob:.4f}"
        for (token_id, logprob), text in zip(one.top, texts, strict=True)
    ]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _as_json(completion: Completion) -> dict[str, Any]:
    """Return a completion for JSON; the fields of choice 0 are also beside those of the request."""
    content = dataclasses.asdict(completion)
    for choice in content["choices"]:
        choice["reason"] = choice["reason"].name
        for one in choice["logprobs"]:
            one["logprob"] = _finite(one["logprob"])
            one["top"] = [(token_id, _finite(logprob)) for token_id, logprob in one["top"]]
    first = {name: value for name, value in content["choices"][0].items() if name != "choice"}
    return {"request_id": content.pop("request_id"), **first, **content}


def _finite(logprob: float) -> float | None:
    """Return None for an infinite value, which JSON cannot hold: a token that is ruled out."""
    return logprob if math.isfinite(logprob) else None
