"""Options of a request that several commands have, from one table."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ParamSpec, get_args

import typer

from tandem.inference.v1 import request_pb2
from tandem_client.params import PresetName

Arguments = ParamSpec("Arguments")

REQUEST_OPTIONS: Mapping[str, Any] = {
    "max_tokens": Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            help="Most output tokens; default: 100, or in a chat until the context ends.",
        ),
    ],
    "min_tokens": Annotated[
        int | None,
        typer.Option(
            "--min-tokens",
            help="Number of output tokens before which EOS and stop strings are ignored.",
        ),
    ],
    "preset": Annotated[
        PresetName | None,
        typer.Option(
            "--preset",
            help="Sampling that suits a use; other options win over what it sets.",
        ),
    ],
    "temperature": Annotated[
        float | None,
        typer.Option("--temperature", help="Randomness, 0 to 2; 0 takes the most likely token."),
    ],
    "top_p": Annotated[
        float | None,
        typer.Option(
            "--top-p", help="Sample from the likeliest tokens that have this probability together."
        ),
    ],
    "top_k": Annotated[
        int | None,
        typer.Option("--top-k", help="Sample from the k most likely tokens; 0 means all."),
    ],
    "min_p": Annotated[
        float | None,
        typer.Option(
            "--min-p",
            help="Sample from tokens at least this many times as likely as the likeliest.",
        ),
    ],
    "repetition_penalty": Annotated[
        float | None,
        typer.Option(
            "--repetition-penalty", help="Above 1: tokens of prompt and output become less likely."
        ),
    ],
    "frequency_penalty": Annotated[
        float | None,
        typer.Option(
            "--frequency-penalty", help="Penalty for each time a token is in the output, -2 to 2."
        ),
    ],
    "presence_penalty": Annotated[
        float | None,
        typer.Option(
            "--presence-penalty", help="Penalty for tokens that are in the output, -2 to 2."
        ),
    ],
    "seed": Annotated[
        int | None,
        typer.Option("--seed", help="Seed of sampling; the same seed gives the same tokens."),
    ],
    "logprobs": Annotated[
        int | None,
        typer.Option(
            "--logprobs",
            help="Print each token's log probability, and this many likeliest alternatives, "
            "0 to 20.",
        ),
    ],
    "prompt_logprobs": Annotated[
        int | None,
        typer.Option(
            "--prompt-logprobs",
            help="Print the log probability and the rank of each token of the prompt, and this "
            "many likeliest alternatives, 0 to 20; with --max-tokens 0 nothing else.",
        ),
    ],
    "stop": Annotated[
        list[str] | None,
        typer.Option("--stop", help="Stop string: the output ends before it; may be repeated."),
    ],
    "ignore_eos": Annotated[
        bool, typer.Option("--ignore-eos", help="Continue past end-of-sequence tokens.")
    ],
    "time_limit_s": Annotated[
        float | None,
        typer.Option(
            "--time-limit-s", help="Seconds after which the output ends, finished or not."
        ),
    ],
    "n": Annotated[
        int | None, typer.Option("-n", "--n", help="Number of completions of the prompt, 1 to 16.")
    ],
    "priority": Annotated[
        int | None,
        typer.Option("--priority", help="Priority of the request, lower goes first; default 0."),
    ],
    "tenant": Annotated[
        str | None, typer.Option("--tenant", help="Tenant whose limits the request counts for.")
    ],
    "cache_salt": Annotated[
        str | None,
        typer.Option(
            "--cache-salt",
            help="Share the prefix cache only with requests that have the same salt.",
        ),
    ],
}
"""
Types and descriptions of options, by their names in GenerateOptions, in the order of the help.
"""

SAMPLING_OPTIONS = tuple(
    name for name in REQUEST_OPTIONS if name in request_pb2.SamplingParams.DESCRIPTOR.fields_by_name
)
"""Options that are sampling parameters."""


def takes_request_options(
    *names: str, after: str
) -> Callable[[Callable[Arguments, None]], Callable[Arguments, None]]:
    """
    Give a command these options of a request; it takes them as ``**asked``, None where unset.

    Args:
        names: Names in REQUEST_OPTIONS, in the order of the command's help.
        after: The command's own option that they follow.
    """

    def decorate(command: Callable[Arguments, None]) -> Callable[Arguments, None]:
        signature = inspect.signature(command, eval_str=True)
        params = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        at = [one.name for one in params].index(after) + 1
        params[at:at] = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=False if kind_of(name) is bool else None,
                annotation=REQUEST_OPTIONS[name],
            )
            for name in names
        ]
        # typer reads both.
        command.__dict__["__signature__"] = signature.replace(parameters=params)
        command.__annotations__ = {one.name: one.annotation for one in params}
        return command

    return decorate


def kind_of(name: str) -> type[int | float | str]:
    """Return the type of an option's values, str for one that has a list of names."""
    hint = get_args(REQUEST_OPTIONS[name])[0]
    numbers: tuple[type[int | float], ...] = (bool, int, float)
    return next((kind for kind in numbers if kind is hint or kind in get_args(hint)), str)
