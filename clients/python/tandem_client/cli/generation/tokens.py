"""`tandem tokenize` and `tandem detokenize`: ids of a prompt, and text of ids."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tandem_client.channel import DEFAULT_ADDRESS, ChannelOptions
from tandem_client.cli.generation.inputs import messages_of, prompt_of
from tandem_client.cli.shared import options
from tandem_client.cli.shared.access import takes_access
from tandem_client.cli.shared.failures import ExitCode, fail, readable_errors
from tandem_client.cli.shared.screen import write
from tandem_client.cli.shared.waiting import Waits, no_answer
from tandem_client.client import Client
from tandem_client.model import PromptTokens
from tandem_client.params import TokenizeOptions

MAX_SHOWN_CHARS = 80
"""Most characters of a wrong input that an error repeats."""

Prompt = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TEXT",
        help="Text to tokenize; - or no text reads it from stdin, TEXT - both.",
        show_default=False,
    ),
]
Messages = Annotated[
    Path | None,
    typer.Option(
        "--messages",
        metavar="FILE",
        help="Conversation to tokenize: a JSON list of messages, or one per line; - is stdin.",
    ),
]
AsChat = Annotated[
    bool,
    typer.Option("--chat", help="Take the text as a user message, through the chat template."),
]
ParsesSpecial = Annotated[
    bool,
    typer.Option(
        "--parse-special-tokens",
        help="Read names of special tokens in the text as these tokens, and add none before it.",
    ),
]
WithTexts = Annotated[
    bool, typer.Option("--texts", help="Print a line per token: its id and its text.")
]
Ids = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="IDS",
        help="Token ids with commas or spaces between them; - or none reads them from stdin.",
        show_default=False,
    ),
]
KeepsSpecial = Annotated[
    bool,
    typer.Option("--keep-special-tokens", help="Write special tokens by their names."),
]
ModelName = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="Name of the model; unset, the one served."),
]


@readable_errors
@takes_access
def tokenize(
    *,
    channel: ChannelOptions,
    text: Prompt = None,
    chat: AsChat = False,
    messages: Messages = None,
    parse_special_tokens: ParsesSpecial = False,
    with_texts: WithTexts = False,
    model: ModelName = None,
    address: options.Address = DEFAULT_ADDRESS,
    as_json: options.Json = False,
) -> None:
    """
    Print the token ids of a prompt.

    They are those that a request with this prompt would run with, in one line with commas between
    them, as `tandem generate --token-ids` and `tandem detokenize` take them.
    """
    if messages is not None and (text or chat):
        raise fail("--messages stands instead of a text and --chat", ExitCode.USAGE)
    if parse_special_tokens and (messages is not None or chat):
        line = "--parse-special-tokens is for a text: a chat template writes special tokens itself"
        raise fail(line, ExitCode.USAGE)
    asked = TokenizeOptions(model=model)
    if with_texts:
        asked["with_texts"] = True
    if parse_special_tokens:
        asked["parse_special_tokens"] = True
    prompt: str | None = None
    if messages is not None:
        asked["messages"] = messages_of(messages)
    else:
        prompt = prompt_of(text or [], command="tokenize")
        if chat:
            asked["messages"], prompt = [{"role": "user", "content": prompt}], None
    with (
        Client(address, retry=options.RETRY, options=channel) as client,
        Waits(no_answer(address)),
    ):
        found = client.tokenize(prompt, **asked)
    write(f"{json.dumps(dataclasses.asdict(found)) if as_json else _shown(found)}\n")


@readable_errors
@takes_access
def detokenize(
    *,
    channel: ChannelOptions,
    ids: Ids = None,
    keep_special_tokens: KeepsSpecial = False,
    model: ModelName = None,
    address: options.Address = DEFAULT_ADDRESS,
    as_json: options.Json = False,
) -> None:
    """
    Print the text of token ids.
    """
    token_ids = _ids_of(ids or [])
    with (
        Client(address, retry=options.RETRY, options=channel) as client,
        Waits(no_answer(address)),
    ):
        text = client.detokenize(token_ids, keep_special_tokens=keep_special_tokens, model=model)
    write(f"{json.dumps({'text': text}) if as_json else text}\n")


def _shown(found: PromptTokens) -> str:
    """Return the ids in one line, or a line per token if their texts were asked for."""
    if not found.texts:
        return ",".join(map(str, found.token_ids))
    return "\n".join(
        f"{token_id:>8}  {json.dumps(text, ensure_ascii=False)}"
        for token_id, text in zip(found.token_ids, found.texts, strict=True)
    )


def _ids_of(words: Sequence[str]) -> list[int]:
    """Parse the ids of arguments, or of stdin."""
    if not words and sys.stdin.isatty():
        raise fail("give token ids: tandem detokenize 1,2,3", ExitCode.USAGE)
    text = sys.stdin.read() if not words or list(words) == ["-"] else " ".join(words)
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        shown = text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
        line = f"token ids are whole numbers with commas or spaces between them, got {shown!r}"
        raise fail(line, ExitCode.USAGE) from None
