"""Reason for which a server will not become ready by itself, as the server reports it."""

from __future__ import annotations

from tandem.errors import InvalidModel, TandemError
from tandem_client.channel import ChannelOptions
from tandem_client.cli.shared.failures import ExitCode, describe
from tandem_client.client import Client
from tandem_client.streams.retry import RetryPolicy

ANSWER_S = 2.0
REFUSAL = "refusal"
"""Key in the metadata of NO_EXECUTOR for the reason why the executors that answer are not used."""


def why_never(address: str, options: ChannelOptions | None = None) -> tuple[str, ExitCode] | None:
    """
    Ask a server for its model, to find out if it can become ready at all.

    Returns:
        The reason why the server cannot serve its model or use its executor until the configuration
        is changed, and the exit code for it; None if it may become ready or does not answer.
    """
    try:
        with Client(address, retry=RetryPolicy(max_attempts=1), options=options) as client:
            client.get_model(deadline_s=ANSWER_S)
    except InvalidModel as error:
        return describe(error), ExitCode.USAGE
    except TandemError as error:
        refusal = error.metadata.get(REFUSAL)
        return (
            (f"the scheduler does not use the executor: {refusal}", ExitCode.USAGE)
            if refusal
            else None
        )
    return None
