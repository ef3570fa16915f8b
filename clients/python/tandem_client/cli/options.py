"""Options that several commands share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tandem.errors import TandemError
from tandem_client.retry import RetryPolicy

RETRY = RetryPolicy(max_attempts=3, resume_within_s=60.0)
"""Somebody waits at the terminal: give up soon."""


def stream_retry(up: Path | None) -> RetryPolicy:
    """
    The same for streams, with a word to whoever reads when one breaks. A server of this command
    alone has no successor to wait for.
    """
    if up is not None:
        return replace(RETRY, resume=False)
    told: set[str] = set()

    def tell(error: TandemError, wait_s: float) -> None:
        del wait_s
        if error.reason not in told:
            told.add(error.reason)
            typer.secho(f"[{error.reason}: looking for a server to go on]", err=True, dim=True)

    return replace(RETRY, on_break=tell)


Address = Annotated[
    str,
    typer.Option(
        "--address",
        envvar="TANDEM_CLIENT_ADDRESS",
        metavar="HOST:PORT",
        help="Server to talk to.",
    ),
]
AdminAddress = Annotated[
    str,
    typer.Option(
        "--admin-address",
        envvar="TANDEM_CLIENT_ADMIN_ADDRESS",
        metavar="HOST:PORT",
        help="Its port for operators.",
    ),
]
Up = Annotated[
    Path | None,
    typer.Option(
        "--up",
        metavar="MODEL_DIR",
        help="Start a server with this model on free ports for this one command.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print only JSON.")]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", help="Most output tokens; default: 100, of a chat until the context ends."
    ),
]
Temperature = Annotated[
    float | None, typer.Option("--temperature", help="0 to 2; 0 always takes the likeliest token.")
]
TopP = Annotated[
    float | None, typer.Option("--top-p", help="Draw from this much probability, (0, 1].")
]
TopK = Annotated[int | None, typer.Option("--top-k", help="Draw from the k likeliest; 0 = all.")]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", help="Draw from tokens this many times as likely as the likeliest."),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option("--repetition-penalty", help="Over 1: what was said or asked is less likely."),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option("--frequency-penalty", help="What was said is less likely each time, -2 to 2."),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option("--presence-penalty", help="What was said at all is less likely, -2 to 2."),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        help="Print each token with its log probability and this many of the likeliest, 0 to 20.",
    ),
]
MinTokens = Annotated[
    int | None, typer.Option("--min-tokens", help="Output tokens before which nothing ends it.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Same seed, same tokens.")]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="Text before which to end; may be repeated.")
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past end-of-sequence tokens.")]
Choices = Annotated[
    int | None, typer.Option("-n", "--n", help="Completions of the prompt, 1 to 16.")
]
Priority = Annotated[int | None, typer.Option("--priority", help="Lower goes first; default 0.")]
Tenant = Annotated[
    str | None, typer.Option("--tenant", help="On whose behalf, for limits per tenant.")
]
CacheSalt = Annotated[
    str | None,
    typer.Option("--cache-salt", help="Share cached prompts only with requests that say the same."),
]
TimeLimit = Annotated[
    float | None,
    typer.Option("--time-limit-s", help="End with what is there after so many seconds."),
]
