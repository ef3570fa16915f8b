"""Clients and a server that speaks TLS."""

from __future__ import annotations

import grpc
import pytest

from tandem.status import PeerUnavailable
from tandem_client import NO_RETRY, AdminClient, AsyncClient, ChannelOptions, Client, is_serving
from tests.clients.python.fake_server import ANSWER, PATIENCE_S, fake_server

# The certificate is for these tests alone: self-signed for localhost and 127.0.0.1, valid until 2126.
CERTIFICATE = b"""\
-----BEGIN CERTIFICATE-----
MIIBnDCCAUGgAwIBAgIUWYrxqQx5JgvajKVnB27F5XIdRXowCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMjIwMDkwNVoYDzIxMjYxMDI5
MjAwOTA1WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAATfZTc1nfh10ZVfbVTVEUu/ny+3RqnbTHxU4cPZCbJL7CBhz2ezkuC6
37f5nmHWgglP8+mvJLaOfReb9xBkJSbro28wbTAdBgNVHQ4EFgQUS0N2l27WTEtv
iH55jKNimUY+EFowHwYDVR0jBBgwFoAUS0N2l27WTEtviH55jKNimUY+EFowDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI
zj0EAwIDSQAwRgIhAJso6PfdrXYj7jhZQb1wXKsi6JXyw7AxbCen+wZM7CYlAiEA
scCIzfYVvxrfT0XZqXPZjQKf7PKeNwmtujMgusrZXpY=
-----END CERTIFICATE-----
"""
KEY = b"""\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgag+JZ7V85tGiAQzv
h2AQlnnuy3X6YKLm/pqE8IBQMnGhRANCAATfZTc1nfh10ZVfbVTVEUu/ny+3Rqnb
THxU4cPZCbJL7CBhz2ezkuC637f5nmHWgglP8+mvJLaOfReb9xBkJSbr
-----END PRIVATE KEY-----
"""


@pytest.fixture(scope="module")
def tls_server():
    """A fake that speaks TLS with the certificate above."""
    with fake_server(grpc.ssl_server_credentials([(KEY, CERTIFICATE)])) as running:
        yield running


@pytest.fixture(scope="module")
def trusting():
    """Options of a client that trusts the certificate."""
    return ChannelOptions(credentials=grpc.ssl_channel_credentials(CERTIFICATE))


class TestCredentials:
    def test_client_speaks_tls(self, tls_server, trusting):
        """
        A client with credentials completes and streams through TLS.
        """
        with Client(tls_server.address, options=trusting) as client:
            assert ANSWER == client.complete("hi").text
            assert ANSWER == "".join(client.generate("hi").text)

    async def test_async_client_speaks_tls(self, tls_server, trusting):
        """
        The client for asyncio speaks TLS too.
        """
        async with AsyncClient(tls_server.address, options=trusting) as client:
            assert ANSWER == (await client.complete("hi")).text

    def test_operators_and_health_speak_tls(self, tls_server, trusting):
        """
        The client for operators and the health check speak TLS too.
        """
        with AdminClient(tls_server.address, options=trusting) as admin:
            assert 2 == admin.stats().running_requests
        assert is_serving(
            tls_server.address, "tandem.ready", timeout_s=PATIENCE_S, options=trusting
        )

    @pytest.mark.parametrize(
        "options",
        [ChannelOptions(), ChannelOptions(credentials=grpc.ssl_channel_credentials())],
        ids=["plain-text", "unknown-certificate"],
    )
    def test_server_that_is_not_trusted_is_not_talked_to(self, tls_server, options):
        """
        Plain text to a server with TLS fails, and so does a certificate that is not trusted.
        """
        with (
            Client(tls_server.address, options=options, retry=NO_RETRY) as client,
            pytest.raises(PeerUnavailable),
        ):
            client.complete("hi", deadline_s=PATIENCE_S)

    def test_plain_server_is_not_trusted_with_credentials(self, server, trusting):
        """
        A client with credentials never falls back to plain text.
        """
        with (
            Client(server.address, options=trusting, retry=NO_RETRY) as client,
            pytest.raises(PeerUnavailable),
        ):
            client.complete("hi", deadline_s=PATIENCE_S)
        assert [] == server.seen.complete
