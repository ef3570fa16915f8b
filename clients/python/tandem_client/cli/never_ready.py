"""Why a server that is not ready never will be, as far as it knows itself."""

from __future__ import annotations

from tandem.errors import InvalidModel, TandemError
from tandem_client.cli.failures import ExitCode, describe
from tandem_client.client import Client
from tandem_client.retry import RetryPolicy

ANSWER_S = 2.0
REFUSAL = "refusal"
"""Metadata of NO_EXECUTOR: why the executors that answer are not used."""


def why_never(address: str) -> tuple[str, ExitCode] | None:
    """
    Ask a server for its model.

    Returns:
        Why it cannot serve it, or use its executor, until somebody changes something, and the exit
        code for that; None where it may become ready, or does not answer.
    """
    try:
        with Client(address, retry=RetryPolicy(max_attempts=1)) as client:
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
