"""Recovery over a step link with client certificates and a token."""

from __future__ import annotations

import secrets

import pytest

from tandem_client import Delta
from tests.certificates import Authority
from tests.e2e.cluster import Cluster

PROMPT = [5, 6, 7, 8]
NUM_TOKENS = 100


@pytest.fixture
def encrypted(tiny_model, tmp_path):
    """Yield a cluster whose services show certificates to each other and share a token."""
    ca = Authority(tmp_path)
    executor, scheduler = ca.issue("executor"), ca.issue("scheduler")
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    cluster = Cluster(
        tiny_model,
        tmp_path,
        [
            "--max-num-blocks=64",
            f"--tls-cert={executor.certificate}",
            f"--tls-key={executor.key}",
            f"--tls-client-ca={ca.file}",
            f"--link-token-file={token}",
        ],
        [
            f"--executor-ca={ca.file}",
            f"--executor-cert={scheduler.certificate}",
            f"--executor-key={scheduler.key}",
            f"--link-token-file={token}",
        ],
    )
    try:
        cluster.start_executor()
        yield cluster
    finally:
        cluster.close()


def test_killed_executor_recovers_as_over_plain_text(encrypted):
    """
    An executor that is killed in the middle of a request is replaced, and the request's output is
    that of an unbroken run.
    """
    with encrypted.client() as client:
        options = {"token_ids": PROMPT, "max_tokens": NUM_TOKENS, "seed": 7, "ignore_eos": True}
        whole = client.complete(**options).token_ids
        tokens = []
        with encrypted.held(10):
            stream = client.generate(**options)
            while not tokens:
                event = next(stream)
                tokens += event.token_ids if isinstance(event, Delta) else ()
            encrypted.executor.kill()
        encrypted.start_executor()
        for event in stream:
            tokens += event.token_ids if isinstance(event, Delta) else ()

    assert NUM_TOKENS == len(whole)
    assert list(whole) == tokens
