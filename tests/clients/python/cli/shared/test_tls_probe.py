"""Ports that speak TLS, told from others."""

from __future__ import annotations

import ssl

import pytest

from tandem.error_codes import DeadlineExceeded
from tandem.network.tls import server_credentials
from tandem.network.tls_files import ServerTls
from tandem.status import PeerUnavailable
from tandem_client.cli.shared.failures import describe
from tandem_client.cli.shared.tls_probe import speaks_tls, wants_tls
from tests.certificates import Authority
from tests.clients.python.fake_server import fake_server


@pytest.mark.parametrize("asks", [False, True], ids=["open", "mutual"])
def test_server_with_tls_speaks_it(tmp_path, asks):
    """A server's TLS is seen without trusting it, whether or not it asks for certificates."""
    ca = Authority(tmp_path)
    pair = ca.issue("server")
    client_ca = ca.file if asks else None
    files = ServerTls(certificate=pair.certificate, key=pair.key, client_ca=client_ca)
    with fake_server(server_credentials(files)) as running:
        assert speaks_tls(running.address)


def test_server_without_tls_does_not(server):
    """A server in plain text answers no handshake."""
    assert not speaks_tls(server.address)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "unix:/nowhere", "nonsense", "dns:///a,b"])
def test_what_cannot_be_asked_does_not(address):
    """A port that is closed, and an address that is no HOST:PORT, say nothing of TLS."""
    assert not speaks_tls(address)


@pytest.mark.parametrize(("reason", "expected"), [("TLSV1_ALERT_NO_CERT", True), (None, False)])
def test_refusal_in_words_of_tls_counts(server, monkeypatch, reason, expected):
    """A server that ends the handshake with an alert speaks TLS."""

    def refuses(*_args, **_options):
        error = ssl.SSLError(1, "refused")
        error.reason = reason
        raise error

    monkeypatch.setattr(ssl.SSLContext, "wrap_socket", refuses)
    assert expected is speaks_tls(server.address)


def test_only_calls_in_plain_text_are_advised(monkeypatch):
    """Advice to give --ca is for calls without it."""
    monkeypatch.setattr("tandem_client.cli.shared.tls_probe.speaks_tls", lambda _: True)
    error = PeerUnavailable("Socket closed")
    assert "give --ca FILE" in describe(error, "a:1", is_encrypted=False)
    assert "Is it running?" in describe(error, "a:1")


@pytest.mark.parametrize(
    ("error", "address", "is_encrypted", "expected"),
    [
        (PeerUnavailable("Socket closed"), "a:1", False, True),
        (PeerUnavailable("Socket closed"), "a:1", True, False),
        (PeerUnavailable("Socket closed"), None, False, False),
        (DeadlineExceeded("late"), "a:1", False, False),
    ],
    ids=["plain", "encrypted", "nowhere", "late"],
)
def test_port_wants_tls_of_a_call_that_was_not_answered_in_plain_text(
    monkeypatch, error, address, is_encrypted, expected
):
    """A port is asked for TLS only where a call in plain text got no answer."""
    monkeypatch.setattr("tandem_client.cli.shared.tls_probe.speaks_tls", lambda _: True)
    assert expected is wants_tls(error, address, is_encrypted=is_encrypted)
