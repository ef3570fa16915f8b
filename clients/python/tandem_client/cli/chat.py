"""`tandem chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer

from tandem.errors import TandemError
from tandem_client.channel import DEFAULT_ADDRESS
from tandem_client.cli import options
from tandem_client.cli.failures import describe, readable_errors
from tandem_client.cli.generate import server_at, summary
from tandem_client.client import Client
from tandem_client.request import GenerateOptions

HINT = "Ctrl-C stops an answer, /reset forgets the conversation, Ctrl-D leaves"

Turn = dict[str, str]


@readable_errors
def chat(
    *,
    address: options.Address = DEFAULT_ADDRESS,
    up: options.Up = None,
    system: Annotated[
        str | None, typer.Option("--system", help="Instructions that open the conversation.")
    ] = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    seed: options.Seed = None,
) -> None:
    """Talk with the model; it remembers the conversation."""
    arguments = GenerateOptions(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        seed=seed,
    )
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, PLC0415 -- gives input() history and editing
    with server_at(address, up) as where, Client(where, retry=options.stream_retry(up)) as client:
        model = client.get_model()
        typer.secho(f"{model.name} at {where}. {HINT}", err=True, dim=True)
        Conversation(client, system, arguments).run()


class Conversation:
    """The turns so far, and the loop that adds to them."""

    def __init__(self, client: Client, system: str | None, arguments: GenerateOptions) -> None:
        self._client = client
        self._opening: list[Turn] = [] if system is None else [_turn("system", system)]
        self._turns: list[Turn] = []
        self._arguments = arguments

    def run(self) -> None:
        """Ask and answer until the end of input."""
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                typer.echo()
                return
            except KeyboardInterrupt:
                typer.secho(f"\n({HINT})", err=True, dim=True)
                continue
            if line == "/reset":
                self._turns.clear()
                typer.secho("(forgotten)", err=True, dim=True)
            elif line:
                self._answer(line)

    def _answer(self, line: str) -> None:
        asked = [*self._turns, _turn("user", line)]
        answer = ""
        with self._client.generate(
            None, **(self._arguments | GenerateOptions(messages=[*self._opening, *asked]))
        ) as stream:
            try:
                for piece in stream.text:
                    answer += piece
                    sys.stdout.write(piece)
                    sys.stdout.flush()
            except KeyboardInterrupt:
                stream.close()
            except TandemError as error:
                # The conversation stays as it was, so that the user can change or repeat the turn.
                typer.echo(f"\n{describe(error, self._client.address)}", err=True)
                return
            typer.secho(f"\n[{summary(stream)}]", err=True, dim=True)
        self._turns = [*asked, _turn("assistant", answer)]


def _turn(role: str, content: str) -> Turn:
    return {"role": role, "content": content}
