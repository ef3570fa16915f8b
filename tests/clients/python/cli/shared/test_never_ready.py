"""Reasons that a server will never be ready, asked of the server itself."""

from __future__ import annotations

import pytest

from tandem.errors import InvalidModel, NoExecutor
from tandem_client.cli.shared.failures import ExitCode
from tandem_client.cli.shared.never_ready import why_never
from tests.ports import free_port

WORDS = "block_size is set to 32, but the executor has 16"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, None),
        (NoExecutor("none yet: try again"), None),
        (
            InvalidModel("tokenizer.json has no decoder"),
            ("INVALID_MODEL: tokenizer.json has no decoder", ExitCode.USAGE),
        ),
        (
            NoExecutor(f"none yet: {WORDS}", metadata={"refusal": WORDS}),
            (f"the scheduler does not use the executor: {WORDS}", ExitCode.USAGE),
        ),
    ],
    ids=["serves", "waits", "model", "executor"],
)
def test_only_what_somebody_must_change_is_a_reason(server, error, expected):
    """
    A model that cannot be served, or an executor that is refused, will never be ready; one that is awaited may be.
    """
    server.seen.model_error = error
    assert expected == why_never(server.address)


def test_server_that_does_not_answer_may_become_ready():
    """
    A server that is not there gives no reason.
    """
    assert why_never(f"127.0.0.1:{free_port()}") is None
