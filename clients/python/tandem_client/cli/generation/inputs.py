"""Inputs of generations as users write them: prompts, conversations, ids and biases."""

from __future__ import annotations

import json
import os
import select
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem_client.cli.shared.failures import ExitCode, fail
from tandem_client.cli.shared.screen import remark

LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias",
        metavar="ID=BIAS",
        help="Value added to the logit of a token id, -100 to 100; may be repeated.",
    ),
]


def prompt_of(arguments: Sequence[str], *, command: str = "generate") -> str:
    """Return the prompt of a command, joined with the text of stdin if that is asked for."""
    if len(arguments) > 2 or (len(arguments) == 2 and arguments[1] != "-"):
        line = f'give one prompt, in quotation marks: tandem {command} "..."'
        raise fail(line, ExitCode.USAGE)
    if not arguments and sys.stdin.isatty():
        raise fail(f'give a prompt: tandem {command} "..."', ExitCode.USAGE)
    if not arguments:
        return sys.stdin.read()
    if "-" not in arguments and _is_piped_text_waiting():
        line = f'stdin was not read; to add its text: tandem {command} "..." -'
        remark(f"tandem: {line}", is_dim=False)
    return "\n\n".join(sys.stdin.read() if one == "-" else one for one in arguments)


def _is_piped_text_waiting() -> bool:
    """Return whether stdin is a pipe from which something could be read now; never wait for it."""
    try:
        descriptor = sys.stdin.fileno()
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return False
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return any(events & select.POLLIN for _, events in poll.poll(0))
    except (AttributeError, OSError, ValueError):  # closed, or none of the operating system's
        return False


def ids_of(text: str) -> list[int]:
    """Parse token ids that are separated by commas."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        line = f"--token-ids takes whole numbers with commas between them, as 1,2,3, got {text!r}"
        raise fail(line, ExitCode.USAGE) from None


def biases_of(words: Sequence[str]) -> dict[int, float]:
    """Parse biases of the form ID=BIAS."""
    try:
        pairs = [word.split("=", 1) for word in words]
        return {int(token_id): float(bias) for token_id, bias in pairs}
    except ValueError:
        line = f"--logit-bias takes ID=BIAS, as 42=-1.5, got {' '.join(words)!r}"
        raise fail(line, ExitCode.USAGE) from None


def messages_of(path: Path) -> list[Any]:
    """
    Read a conversation: a JSON list of messages, or a message per line. The path - is stdin.
    """
    text = text_of_file(path)
    try:
        found = json.loads(text)
    except ValueError:
        found = [parsed(line, path, number) for number, line in lines_of(text)]
    return found if isinstance(found, list) else [found]


def text_of_file(path: Path) -> str:
    """Return the text of a file; the path - is stdin."""
    if str(path) == "-":
        return sys.stdin.read()
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise fail(f"{path} is not UTF-8 text", ExitCode.USAGE) from None


def lines_of(text: str) -> list[tuple[int, str]]:
    """Return the lines of a text that are not blank, with their numbers from 1."""
    # Only line feeds end a line of NDJSON; a text in it may hold other line separators.
    return [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def parsed(line: str, path: Path, number: int) -> Any:
    """Parse a line of NDJSON."""
    try:
        return json.loads(line)
    except ValueError as error:
        raise fail(f"{path}:{number} is not JSON: {error}", ExitCode.USAGE) from None
