"""`tandem chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated, cast

import typer

from tandem.errors import NeverFits, PromptTooLong, TandemError, TotalTooLong
from tandem_client.channel import DEFAULT_ADDRESS, ChannelOptions
from tandem_client.cli.generation.chat_commands import (
    Conversation,
    Leave,
    Mistake,
    read_message,
    run_command,
)
from tandem_client.cli.generation.output import summary
from tandem_client.cli.local_server.own_server import server_at
from tandem_client.cli.shared import options
from tandem_client.cli.shared.access import takes_access, used_with
from tandem_client.cli.shared.failures import describe, readable_errors
from tandem_client.cli.shared.request_options import SAMPLING_OPTIONS, takes_request_options
from tandem_client.cli.shared.screen import remark, write
from tandem_client.cli.shared.waiting import Waits, no_answer, told
from tandem_client.client import Client
from tandem_client.params import BOTH_CHANGED, GenerateOptions, changes_both
from tandem_client.streams.stream import text_of

HINT = "Ctrl-C stops an answer, Ctrl-D leaves, /help lists commands"


@readable_errors
@takes_access
@takes_request_options("max_tokens", "preset", *SAMPLING_OPTIONS, after="system")
def chat(
    *,
    channel: ChannelOptions,
    address: options.Address = DEFAULT_ADDRESS,
    up: options.Up = None,
    system: Annotated[
        str | None, typer.Option("--system", help="Instructions that open the conversation.")
    ] = None,
    **asked: object,
) -> None:
    """
    Talk with the model; it remembers the conversation.

    Lines that begin with / are commands, /help lists them. A message of several lines stands
    between two lines of three quotation marks, or has a backslash at the end of each line.
    """
    arguments = cast("GenerateOptions", asked)
    if changes_both(arguments):
        remark(f"[{BOTH_CHANGED}]")
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, PLC0415  # gives input() history and editing
    with (
        server_at(address, up) as where,
        Client(where, retry=options.stream_retry(up), options=used_with(channel, up)) as client,
    ):
        with Waits(no_answer(where)):
            model = client.get_model()
        remark(f"{model.name} at {where}. {HINT}")
        _talk(client, Conversation(system=system, options=arguments))


def _talk(client: Client, conversation: Conversation) -> None:
    """Read and answer messages until the end of input."""
    while True:
        try:
            message = read_message(_ask)
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            remark(f"\n({HINT})")
            continue
        try:
            if message.is_command:
                remark(f"({run_command(message.text, conversation)})")
            elif message.text:
                _answer(client, conversation, message.text)
        except Leave:
            return
        except Mistake as mistake:
            typer.echo(f"{mistake}", err=True)


def _answer(client: Client, conversation: Conversation, asked: str) -> None:
    answer = ""
    try:
        with client.generate(
            None,
            **(conversation.options | GenerateOptions(messages=conversation.messages_with(asked))),
        ) as stream:
            try:
                for piece in text_of(told(stream, client.address)):
                    answer += piece
                    write(piece)
            except KeyboardInterrupt:
                stream.close()
            remark(f"\n[{summary(stream)}]")
    except TandemError as error:
        # The conversation stays as it was, so that the user can change or repeat the turn.
        remark(f"\n{describe(error, client.address)}", is_dim=False)
        if isinstance(error, PromptTooLong | TotalTooLong | NeverFits) and conversation.turns:
            remark("(/clear forgets the conversation so far, which is sent with every message)")
        return
    conversation.add(asked, answer)


def _ask(prompt: str) -> str:
    """Read a line; a file that is piped in needs no prompt."""
    return input(prompt if sys.stdin.isatty() else "")
