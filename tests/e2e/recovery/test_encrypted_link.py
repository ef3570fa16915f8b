"""A step link with client certificates and a token: recovery, and files that are replaced."""

from __future__ import annotations

import secrets
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem_client import Delta, Started
from tests.certificates import Authority, Pair, first_certificate, shown_certificate
from tests.e2e.cluster import Cluster

PROMPT = [5, 6, 7, 8]
NUM_TOKENS = 100


NUM_STREAMS = 64
NUM_ROTATIONS = 3
STEPS_BETWEEN = 5


class EncryptedCluster(Cluster):
    """A cluster whose services show certificates to each other and share a token."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.ca = Authority(folder)
        self.ca_file = folder / "link-ca.pem"
        executor, scheduler = self.issue(self.ca)
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        super().__init__(
            model,
            folder,
            [
                "--max-num-blocks=512",
                f"--max-batch-size={NUM_STREAMS}",
                f"--tls-cert={executor.certificate}",
                f"--tls-key={executor.key}",
                f"--tls-client-ca={self.ca_file}",
                f"--link-token-file={token}",
            ],
            [
                f"--executor-ca={self.ca_file}",
                f"--executor-cert={scheduler.certificate}",
                f"--executor-key={scheduler.key}",
                f"--link-token-file={token}",
            ],
        )

    def issue(self, ca: Authority) -> tuple[Pair, Pair]:
        """Replace the files of both services by new ones of a CA that has the folder of the old."""
        self.ca_file.write_bytes(ca.file.read_bytes())
        return ca.issue("executor"), ca.issue("scheduler")

    def shown(self, ca: Authority) -> bytes:
        """Return the certificate that the executor shows to a new connection of the scheduler's."""
        context = ssl.create_default_context(cafile=ca.file)
        pair = self.ca.issue("checking")
        context.load_cert_chain(pair.certificate, pair.key)
        context.set_alpn_protocols(["h2"])
        return shown_certificate(self.executor_address, context)


@pytest.fixture
def encrypted(tiny_model, tmp_path) -> Iterator[EncryptedCluster]:
    """Yield a cluster that is ready."""
    cluster = EncryptedCluster(tiny_model, tmp_path)
    try:
        cluster.start_executor()
        yield cluster
    finally:
        cluster.close()


def options(seed: int) -> dict[str, object]:
    return {"token_ids": PROMPT, "max_tokens": NUM_TOKENS, "seed": seed, "ignore_eos": True}


def until_token(stream) -> list[int]:
    """Read a stream up to its first tokens, and return them."""
    return list(next(event for event in stream if isinstance(event, Delta)).token_ids)


def rest_of(stream) -> list[int]:
    return [id_ for event in stream if isinstance(event, Delta) for id_ in event.token_ids]


@pytest.mark.slow
def test_rotated_certificates_lose_no_token(encrypted):
    """
    Of 64 streams none fails or loses a token while the certificates of both ends of the link are
    replaced three times; new connections to the executor see the newest one.
    """
    with encrypted.client() as client:
        asked = [options(seed) for seed in range(NUM_STREAMS)]
        outcomes = client.generate_many(asked, concurrency=NUM_STREAMS)
        whole = [list(outcome.token_ids) for outcome in outcomes]
        seen = set()
        with encrypted.held(STEPS_BETWEEN):
            streams = [client.generate(**one) for one in asked]
            assert all(isinstance(next(stream), Started) for stream in streams)
            encrypted.step_until(
                lambda: NUM_STREAMS == encrypted.stats().running_requests, "all streams to run"
            )
            for _ in range(NUM_ROTATIONS):
                pair, _ = encrypted.issue(encrypted.ca)
                found = encrypted.shown(encrypted.ca)
                assert first_certificate(pair.certificate) == found
                seen.add(found)
                encrypted.gate.allow(STEPS_BETWEEN)
        assert whole == [rest_of(stream) for stream in streams]
    assert NUM_ROTATIONS == len(seen)


@pytest.mark.slow
def test_next_link_uses_another_ca(encrypted, tmp_path):
    """
    When the CA of the link is replaced too, running requests go on, and the link to a restarted
    executor uses the new one: neither service but the executor is started again.
    """
    with encrypted.client() as client:
        whole = list(client.complete(**options(7)).token_ids)
        with encrypted.held(10):
            stream = client.generate(**options(7))
            tokens = until_token(stream)
            encrypted.issue(Authority(tmp_path, "next-ca"))
            encrypted.executor.kill()
        encrypted.start_executor()
        tokens += rest_of(stream)
    assert whole == tokens


@pytest.mark.slow
def test_killed_executor_recovers_as_over_plain_text(encrypted):
    """
    An executor that is killed in the middle of a request is replaced, and the request's output is
    that of an unbroken run.
    """
    with encrypted.client() as client:
        whole = client.complete(**options(7)).token_ids
        with encrypted.held(10):
            stream = client.generate(**options(7))
            tokens = until_token(stream)
            encrypted.executor.kill()
        encrypted.start_executor()
        tokens += rest_of(stream)

    assert NUM_TOKENS == len(whole)
    assert list(whole) == tokens
