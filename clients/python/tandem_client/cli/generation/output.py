"""Output of generations: text, summary, tokens with log probabilities, and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tandem_client.cli.shared.screen import write
from tandem_client.cli.shared.waiting import say
from tandem_client.events import Completion, Delta, Event, PromptLogprobs, TokenLogprobs
from tandem_client.streams.stream import GenerationStream, text_of

LOGPROBS_HEADER = "   token   logprob   share  text          likeliest: token text logprob"
PROMPT_LOGPROBS_HEADER = (
    "  prompt   logprob   share   rank  text          likeliest: token text logprob"
)


def write_stream(
    stream: GenerationStream,
    events: Iterable[Event],
    *,
    several: bool,
    with_logprobs: bool,
    as_ids: bool = False,
) -> None:
    """
    Print the text of a stream, or its tokens with their log probabilities, and a summary. With
    `as_ids`, print the ids of the output instead of its text.
    """
    if several:
        for one in collect(stream, events).choices:
            text = " ".join(map(str, one.token_ids)) if as_ids else one.text
            write(f"--- choice {one.choice}, {one.reason.name}\n{text}\n")
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
        for piece in text_of(with_ids(events) if as_ids else events):
            write(piece)
        if stream.started is None or stream.started.params.max_tokens > 0:
            write("\n")
    say(summary(stream))


def with_prompt_shown(events: Iterable[Event]) -> Iterator[Event]:
    """
    Yield the events, and print the tokens of the prompt with their log probabilities as they come,
    each once; an empty line parts them from the output.
    """
    num_shown, is_parted = 0, False
    for event in events:
        if isinstance(event, PromptLogprobs):
            lines = prompt_logprob_lines(event)[max(0, num_shown - event.first_position) :]
            header = [] if num_shown else [PROMPT_LOGPROBS_HEADER]
            write("".join(f"{line}\n" for line in header + lines))
            num_shown += len(lines)
        elif num_shown and isinstance(event, Delta) and not is_parted:
            write("\n")
            is_parted = True
        yield event


def collect(stream: GenerationStream, events: Iterable[Event]) -> Completion:
    """Read the events, which are those of the stream, to the end; return the whole completion."""
    for _ in events:
        pass
    return stream.result()


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


def logprob_lines(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[str]:
    """Return a line per token: id, log probability, share, text, and the likeliest ids likewise."""
    return [
        f"{token_id:>8} {one.logprob:9.4f} {math.exp(one.logprob):7.2%}  {_quoted(one.text):<13} "
        + "  ".join(_alternatives(one))
        for token_id, one in zip(token_ids, logprobs, strict=False)
    ]


def prompt_logprob_lines(prompt: PromptLogprobs) -> list[str]:
    """Return a line per token of the prompt, as `logprob_lines`, with the token's rank."""
    lines = []
    for token_id, text, one in zip(prompt.token_ids, prompt.texts, prompt.logprobs, strict=True):
        figures = (
            f"{'-':>9} {'-':>7} {'-':>6}"  # nothing predicts the first token
            if one is None
            else f"{one.logprob:9.4f} {math.exp(one.logprob):7.2%} {one.rank:>6}"
        )
        likeliest = "  ".join(() if one is None else _alternatives(one))
        lines.append(f"{token_id:>8} {figures}  {_quoted(text):<13} {likeliest}".rstrip())
    return lines


def _alternatives(one: TokenLogprobs) -> list[str]:
    texts = one.top_texts or ("",) * len(one.top)  # an older server sends no texts
    return [
        f"{token_id} {_quoted(text)} {logprob:.4f}"
        for (token_id, logprob), text in zip(one.top, texts, strict=True)
    ]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def event_json(event: Event) -> dict[str, Any]:
    """Return an event for JSON, with its kind as `event`."""
    content = dataclasses.asdict(event)
    if "reason" in content:
        content["reason"] = content["reason"].name
    _make_plain(content.get("logprobs", ()))
    return {"event": type(event).__name__.lower(), **content}


def json_of(completion: Completion) -> dict[str, Any]:
    """Return a completion for JSON; the fields of choice 0 are also beside those of the request."""
    content = dataclasses.asdict(completion)
    for choice in content["choices"]:
        choice["reason"] = choice["reason"].name
        _make_plain(choice["logprobs"])
    if content["prompt"] is None:
        del content["prompt"]
    else:
        _make_plain(content["prompt"]["logprobs"])
    first = {name: value for name, value in content["choices"][0].items() if name != "choice"}
    return {"request_id": content.pop("request_id"), **first, **content}


def _make_plain(logprobs: Iterable[dict[str, Any] | None]) -> None:
    """
    Replace what JSON cannot hold: infinities, and bytes, of which only those asked for stay. The
    rank stays with tokens of prompts.
    """
    for one in logprobs:
        if one is None:  # the prompt's first token
            continue
        if not one["rank"]:
            del one["rank"]
        raw, top_raw = one.pop("token_bytes"), one.pop("top_token_bytes")
        requested = one.pop("requested")
        if requested:
            one["requested"] = [_finite(logprob) for logprob in requested]
        if raw or top_raw:
            one["token_bytes"] = list(raw)
            one["top_token_bytes"] = [list(alternative) for alternative in top_raw]
        one["logprob"] = _finite(one["logprob"])
        one["top"] = [(token_id, _finite(logprob)) for token_id, logprob in one["top"]]


def _finite(logprob: float) -> float | None:
    """Return None for an infinite value, which JSON cannot hold: a token that is ruled out."""
    return logprob if math.isfinite(logprob) else None
