"""Options and retry policies that several commands share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tandem.errors import Draining, ExecutorLost, HandedOver, TandemError
from tandem.status import PeerUnavailable
from tandem_client.cli.shared.screen import remark
from tandem_client.request import PresetName
from tandem_client.retry import RetryPolicy

RETRY = RetryPolicy(max_attempts=3, resume_within_s=60.0)
"""Retry policy of commands, which gives up soon because a user waits at the terminal."""


_BREAKS = {
    Draining: "the server is stopping",
    HandedOver: "the server is stopping",
    PeerUnavailable: "the connection broke",
    ExecutorLost: "the server lost its executor",
}
"""Texts for the errors that break a stream; other errors are shown by their reason."""


def stream_retry(up: Path | None) -> RetryPolicy:
    """
    Return RETRY for streams, with a remark on the terminal when one breaks, once per reason.
    Without `resume` if the server runs for this command alone: it has no successor to wait for.
    """
    if up is not None:
        return replace(RETRY, resume=False)
    told: set[str] = set()

    def tell(error: TandemError, wait_s: float) -> None:
        del wait_s
        if error.reason not in told:
            told.add(error.reason)
            why = _BREAKS.get(type(error), error.reason)
            limit = f"for up to {RETRY.resume_within_s:g} s"
            remark(f"[{why}: looking for a server to go on, {limit}]")

    return replace(RETRY, on_break=tell)


TokenIds = Annotated[
    str | None,
    typer.Option(
        "--token-ids",
        metavar="ID,ID,...",
        help="Token ids to continue instead of text; of a model without a tokenizer the output is "
        "printed as ids, too.",
    ),
]
Address = Annotated[
    str,
    typer.Option(
        "--address",
        envvar="TANDEM_CLIENT_ADDRESS",
        metavar="HOST:PORT",
        help="Address of the server.",
    ),
]
AdminAddress = Annotated[
    str,
    typer.Option(
        "--admin-address",
        envvar="TANDEM_CLIENT_ADMIN_ADDRESS",
        metavar="HOST:PORT",
        help="Address of the server's port for operators.",
    ),
]
Up = Annotated[
    Path | None,
    typer.Option(
        "--up",
        metavar="MODEL_DIR",
        help="Start a server with this model, on free ports, for this command alone.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        help="Most output tokens; default: 100, or in a chat until the context ends.",
    ),
]
Preset = Annotated[
    PresetName | None,
    typer.Option(
        "--preset",
        help="Sampling that suits a use; other options win over what it sets.",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", help="Randomness, 0 to 2; 0 takes the most likely token."),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p", help="Sample from the likeliest tokens that have this probability together."
    ),
]
TopK = Annotated[
    int | None, typer.Option("--top-k", help="Sample from the k most likely tokens; 0 means all.")
]
MinP = Annotated[
    float | None,
    typer.Option(
        "--min-p", help="Sample from tokens at least this many times as likely as the likeliest."
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty", help="Above 1: tokens of prompt and output become less likely."
    ),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(
        "--frequency-penalty", help="Penalty for each time a token is in the output, -2 to 2."
    ),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option("--presence-penalty", help="Penalty for tokens that are in the output, -2 to 2."),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        help="Print each token's log probability, and this many likeliest alternatives, 0 to 20.",
    ),
]
MinTokens = Annotated[
    int | None,
    typer.Option(
        "--min-tokens",
        help="Number of output tokens before which EOS and stop strings are ignored.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", help="Seed of sampling; the same seed gives the same tokens."),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", help="Stop string: the output ends before it; may be repeated."),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Continue past end-of-sequence tokens.")
]
Choices = Annotated[
    int | None, typer.Option("-n", "--n", help="Number of completions of the prompt, 1 to 16.")
]
Priority = Annotated[
    int | None,
    typer.Option("--priority", help="Priority of the request, lower goes first; default 0."),
]
Tenant = Annotated[
    str | None, typer.Option("--tenant", help="Tenant whose limits the request counts for.")
]
CacheSalt = Annotated[
    str | None,
    typer.Option(
        "--cache-salt", help="Share the prefix cache only with requests that have the same salt."
    ),
]
TimeLimit = Annotated[
    float | None,
    typer.Option("--time-limit-s", help="Seconds after which the output ends, finished or not."),
]
