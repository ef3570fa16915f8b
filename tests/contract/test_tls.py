"""TLS credentials from files: what is refused at the start, who may connect, and new files."""

from __future__ import annotations

import queue
import shutil
import ssl
from contextlib import contextmanager

import grpc
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from structlog.testing import capture_logs

from tandem.errors import InvalidConfig
from tandem.network.tls import ClientCredentials, server_credentials
from tandem.network.tls_files import ClientTls, ServerTls, client_tls, server_tls
from tandem.network.tls_pairs import expiry
from tandem.process.loaded_files import LOADED
from tests.certificates import Authority
from tests.one_method_server import OneMethodServer

METHOD = "/test/Echo"
DEADLINE_S = 60.0


@pytest.fixture
def ca(tmp_path):
    """Return the CA that servers and clients trust."""
    return Authority(tmp_path)


def echo(requests, _context):
    """Answer each message with itself."""
    yield from requests


@contextmanager
def echo_server(tls):
    server = OneMethodServer(METHOD, echo, credentials=server_credentials(tls))
    try:
        yield server.address
    finally:
        server.server.stop(0).wait()


def files_of(pair, **others):
    return ServerTls(certificate=pair.certificate, key=pair.key, **others)


def client_of(ca, pair=None):
    """Return credentials of a client that trusts a CA and shows a pair."""
    files = ClientTls(ca=ca.file, certificate=pair and pair.certificate, key=pair and pair.key)
    return ClientCredentials(files).get()


def unchecked_client_of(ca, pair):
    """Return credentials whose pair was not checked, as those of a foreign client."""
    return grpc.ssl_channel_credentials(
        ca.file.read_bytes(), pair.key.read_bytes(), pair.certificate.read_bytes()
    )


def call(address, credentials):
    """Call once over a new connection; return the answer or the error's code."""
    with grpc.secure_channel(
        address, credentials, options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        try:
            return next(channel.stream_stream(METHOD)(iter([b"hello"]), timeout=DEADLINE_S))
        except grpc.RpcError as error:
            return error.code()


def ssl_certificate_of(address):
    """Return the certificate that a server shows, as it is encoded."""
    host, _, port = address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)), timeout=DEADLINE_S)


class TestFilesAtTheStart:
    @pytest.mark.parametrize(
        ("spoil", "why"),
        [
            (lambda pair: pair.certificate.unlink(), "cannot read the TLS file"),
            (lambda pair: pair.key.unlink(), "cannot read the TLS file"),
            (lambda pair: pair.key.write_text("no key"), "are no TLS certificate and key in PEM"),
            (lambda pair: pair.certificate.write_text(""), "are no TLS certificate and key in PEM"),
        ],
        ids=["no-certificate", "no-key", "key-of-other-text", "empty-certificate"],
    )
    def test_missing_and_unreadable_files_are_named(self, ca, spoil, why):
        """A file that cannot be used is an error of the configuration, which names it."""
        pair = ca.issue("server")
        spoil(pair)

        with pytest.raises(InvalidConfig, match=why) as refused:
            server_credentials(files_of(pair))

        assert str(pair.certificate.parent) in refused.value.message

    def test_key_of_another_certificate_is_refused(self, ca):
        """Certificate and key must belong together."""
        one, other = ca.issue("one"), ca.issue("other")

        with pytest.raises(InvalidConfig, match="does not belong to the certificate"):
            server_credentials(ServerTls(certificate=one.certificate, key=other.key))

    @pytest.mark.parametrize("purpose", [ssl.Purpose.SERVER_AUTH, ssl.Purpose.CLIENT_AUTH])
    def test_expired_certificate_is_refused(self, ca, purpose):
        """A certificate that has expired is refused, for a server and for a client."""
        pair = ca.issue_expired("late")

        with pytest.raises(InvalidConfig, match="cannot be used: certificate has expired"):
            expiry(pair.certificate, pair.key, purpose)

    def test_encrypted_key_is_refused(self, ca):
        """A key with a password is refused; no process asks for one."""
        pair = ca.issue("server")
        key = load_pem_private_key(pair.key.read_bytes(), password=None)
        pair.key.write_bytes(
            key.private_bytes(
                Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password")
            )
        )

        with pytest.raises(InvalidConfig, match="is encrypted: store it without a password"):
            server_credentials(files_of(pair))

    def test_ca_file_without_certificate_is_refused(self, ca, tmp_path):
        """A file of CAs that holds none is refused, at either end."""
        empty = tmp_path / "empty.pem"
        empty.write_text("nothing")

        with pytest.raises(InvalidConfig, match="no certificate in PEM format to trust"):
            server_credentials(files_of(ca.issue("server"), client_ca=empty))
        with pytest.raises(InvalidConfig, match="no certificate in PEM format to trust"):
            ClientCredentials(ClientTls(ca=empty))

    def test_settings_that_need_others_are_refused(self, tmp_path):
        """A certificate without its key, or a client CA alone, is refused by the settings' names."""
        one = tmp_path / "one.pem"

        assert server_tls(None, None, None) is None
        assert client_tls(None, None, None) is None
        for given in ((one, None, None), (None, one, None), (None, None, one)):
            with pytest.raises(InvalidConfig, match="tls_cert and tls_key together"):
                server_tls(*given)
        for given in ((None, one, None), (one, None, one)):
            with pytest.raises(InvalidConfig, match="executor_cert and executor_key together"):
                client_tls(*given, prefix="executor_")


class TestConnecting:
    def test_client_that_trusts_the_ca_is_served(self, ca):
        """A client with the server's CA gets its answer over TLS."""
        with echo_server(files_of(ca.issue("server"))) as address:
            assert call(address, client_of(ca)) == b"hello"

    def test_client_with_another_ca_refuses_the_server(self, ca, tmp_path):
        """A client does not call a server that its CA has not signed."""
        other = Authority(tmp_path, "other")

        with echo_server(files_of(ca.issue("server"))) as address:
            assert grpc.StatusCode.UNAVAILABLE == call(address, client_of(other))

    def test_client_of_the_client_ca_alone_is_served(self, ca, tmp_path):
        """
        With a client CA, a client without a certificate, with a stranger's or with an expired one
        gets no answer.
        """
        other = Authority(tmp_path, "other")
        mine, foreign, late = ca.issue("mine"), other.issue("foreign"), ca.issue_expired("late")

        with echo_server(files_of(ca.issue("server"), client_ca=ca.file)) as address:
            assert call(address, client_of(ca, mine)) == b"hello"
            assert grpc.StatusCode.UNAVAILABLE == call(address, client_of(ca))
            for stranger in (foreign, late):
                assert grpc.StatusCode.UNAVAILABLE == call(
                    address, unchecked_client_of(ca, stranger)
                )

    async def test_asyncio_server_takes_the_same_credentials(self, ca):
        """A server of grpc.aio serves TLS with client certificates, and reloads them too."""
        pair, mine = ca.issue("server"), ca.issue("mine")
        server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(_answer_again)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test", {"Echo": handler}),)
        )
        credentials = server_credentials(files_of(pair, client_ca=ca.file))
        address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
        await server.start()
        try:
            assert b"hello" == await call_async(address, client_of(ca, mine))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call_async(address, client_of(ca))
            assert grpc.StatusCode.UNAVAILABLE == refused.value.code()
            ca.issue("server", "elsewhere.example")
            with pytest.raises(grpc.aio.AioRpcError):
                await call_async(address, client_of(ca, mine))
        finally:
            await server.stop(None)


async def _answer_again(request, _context):
    return request


async def call_async(address, credentials):
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
        return await channel.unary_unary(METHOD)(b"hello", timeout=DEADLINE_S)


class TestNewFiles:
    def test_new_pair_is_used_and_an_open_stream_goes_on(self, ca):
        """A replaced pair is shown to the next connection; a stream that is open is not ended."""
        pair, messages = ca.issue("server"), queue.SimpleQueue()

        with (
            echo_server(files_of(pair)) as address,
            grpc.secure_channel(address, client_of(ca)) as channel,
        ):
            stream = channel.stream_stream(METHOD)(iter(messages.get, None), timeout=DEADLINE_S)
            messages.put(b"before")
            assert next(stream) == b"before"
            shown_before = ssl_certificate_of(address)
            ca.issue("server")
            shown_after = ssl_certificate_of(address)
            messages.put(b"after")
            assert next(stream) == b"after"
            messages.put(None)

        assert pair.certificate.read_text().startswith(shown_after)
        assert shown_before != shown_after

    def test_broken_new_pair_is_logged_once_and_the_old_one_kept(self, ca):
        """A pair that does not belong together is logged, and the one before it serves on."""
        pair, other = ca.issue("server"), ca.issue("other")

        with echo_server(files_of(pair)) as address:
            before = ssl_certificate_of(address)
            shutil.copy(other.key, pair.key)
            with capture_logs() as logs:
                assert [before] * 2 == [ssl_certificate_of(address) for _ in range(2)]

        assert ["files_refused"] == [line["event"] for line in logs]
        assert "does not belong to the certificate" in logs[0]["message"]

    def test_files_in_force_are_told_with_the_expiry_of_certificates(self, ca):
        """A refused pair is told until a usable one follows, and then the new one's expiry."""
        pair, other = ca.issue("server"), ca.issue("other")
        path, whole = str(pair.certificate), pair.key.read_bytes()

        with echo_server(files_of(pair)) as address:
            first = expiry(pair.certificate, pair.key, ssl.Purpose.SERVER_AUTH).timestamp()
            told = [(LOADED.is_refused()[path], LOADED.expirations_s()[path])]
            shutil.copy(other.key, pair.key)
            ssl_certificate_of(address)
            told.append((LOADED.is_refused()[path], LOADED.expirations_s()[path]))
            pair.key.write_bytes(whole)
            ssl_certificate_of(address)
            told.append((LOADED.is_refused()[path], LOADED.expirations_s()[path]))

        assert [(False, first), (True, first), (False, first)] == told

    def test_new_client_ca_shuts_out_clients_of_the_old_one(self, ca, tmp_path):
        """A replaced client CA decides from the next connection on."""
        mine, next_ca = ca.issue("mine"), Authority(tmp_path, "next")
        trusted = tmp_path / "trusted.pem"
        shutil.copy(ca.file, trusted)

        with echo_server(files_of(ca.issue("server"), client_ca=trusted)) as address:
            assert call(address, client_of(ca, mine)) == b"hello"
            shutil.copy(next_ca.file, trusted)
            assert grpc.StatusCode.UNAVAILABLE == call(address, client_of(ca, mine))
            assert call(address, client_of(ca, next_ca.issue("new"))) == b"hello"

    def test_client_uses_its_new_pair_and_keeps_the_old_one_if_that_is_broken(self, ca):
        """A client's next channel has the newest pair that can be used."""
        pair = ca.issue("mine")
        credentials = ClientCredentials(
            ClientTls(ca=ca.file, certificate=pair.certificate, key=pair.key)
        )
        first = credentials.get()
        ca.issue("mine")
        second = credentials.get()
        pair.key.write_text("no key")

        assert first is not second
        assert second is credentials.get()
