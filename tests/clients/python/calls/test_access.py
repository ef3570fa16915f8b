"""Access of clients to servers: API keys, certificates, several servers."""

from __future__ import annotations

import grpc
import pytest

from tandem.errors import InvalidConfig
from tandem.network.tls import server_credentials
from tandem.network.tls_files import ServerTls
from tandem.status import PeerUnavailable
from tandem_client import NO_RETRY, AdminClient, AsyncClient, ChannelOptions, Client
from tandem_client.targets import target_of
from tests.certificates import Authority
from tests.clients.python.fake_server import ANSWER, PATIENCE_S, fake_server
from tests.ports import free_port


class Seen(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
):
    """Interceptor that notes the credential of each call."""

    def __init__(self):
        self.credentials = []

    def _note(self, continuation, details, request):
        self.credentials += [value for key, value in details.metadata if key == "authorization"]
        return continuation(details, request)

    intercept_unary_unary = intercept_unary_stream = _note


class AsyncSeen(grpc.aio.UnaryUnaryClientInterceptor):
    """The same for asyncio."""

    def __init__(self):
        self.credentials = []

    async def intercept_unary_unary(self, continuation, details, request):
        self.credentials += [value for key, value in details.metadata if key == "authorization"]
        return await continuation(details, request)


@pytest.fixture
def ca(tmp_path):
    """Return the CA that server and client trust."""
    return Authority(tmp_path)


@pytest.fixture
def mutual(ca):
    """Yield a server that asks for certificates of the CA."""
    pair = ca.issue("server")
    files = ServerTls(certificate=pair.certificate, key=pair.key, client_ca=ca.file)
    with fake_server(server_credentials(files)) as running:
        yield running


class TestApiKey:
    def test_every_call_carries_the_key(self, server):
        """Unary calls, streams and operators' calls carry the API key as a bearer token."""
        seen = Seen()
        options = ChannelOptions(interceptors=(seen,))
        with Client(server.address, api_key="sesame", options=options) as client:
            client.complete("hi")
            list(client.generate("hi").text)
        with AdminClient(server.address, api_key="sesame", options=options) as admin:
            admin.stats()

        assert ["Bearer sesame"] * 3 == seen.credentials

    async def test_asyncio_asks_a_function_before_each_call(self, server):
        """A key may be a function, which is asked before each call."""
        seen, keys = AsyncSeen(), iter(("one", "two"))
        options = ChannelOptions(interceptors=(seen,))
        async with AsyncClient(
            server.address, api_key=lambda: next(keys), options=options
        ) as client:
            await client.complete("hi")
            await client.complete("hi")

        assert ["Bearer one", "Bearer two"] == seen.credentials

    def test_environment_gives_address_and_key(self, server, monkeypatch):
        """TANDEM_ADDRESS and TANDEM_API_KEY stand in for what is not given."""
        monkeypatch.setenv("TANDEM_ADDRESS", server.address)
        monkeypatch.setenv("TANDEM_ADMIN_ADDRESS", server.address)
        monkeypatch.setenv("TANDEM_API_KEY", "from-the-environment")
        seen = Seen()
        options = ChannelOptions(interceptors=(seen,))
        with (
            Client(options=options) as client,
            AdminClient(api_key="mine", options=options) as admin,
        ):
            assert server.address == client.address
            assert ANSWER == client.complete("hi").text
            admin.stats()

        assert ["Bearer from-the-environment", "Bearer mine"] == seen.credentials

    def test_credential_in_the_metadata_wins(self, server):
        """A client that sets the credential of its calls itself sends that one alone."""
        seen = Seen()
        options = ChannelOptions(api_key="sesame", interceptors=(seen,))
        with Client(server.address, options=options) as client:
            client.with_options(metadata={"authorization": "Basic other"}).complete("hi")

        assert ["Basic other"] == seen.credentials

    @pytest.mark.parametrize("key", ["with space", "line\n", "schlüssel"])
    def test_key_that_metadata_cannot_carry_is_refused(self, server, key):
        """A key with a space, a line break or a letter that is not ASCII is an error of its own."""
        with (
            Client(server.address, api_key=key) as client,
            pytest.raises(InvalidConfig, match="printable ASCII"),
        ):
            client.complete("hi")

    def test_key_is_not_shown(self):
        """Printing the options of a connection shows no key."""
        assert "sesame" not in repr(ChannelOptions(api_key="sesame"))


class TestCertificates:
    def test_client_with_its_files_is_served(self, mutual, ca):
        """A client with the CA and a pair talks to a server that asks for certificates."""
        mine = ca.issue("mine")
        files = {"ca": ca.file, "cert": mine.certificate, "key": mine.key}
        with (
            Client(mutual.address, **files) as client,
            AdminClient(mutual.address, **files) as admin,
        ):
            assert ANSWER == client.complete("hi").text
            assert 2 == admin.stats().running_requests

    async def test_asyncio_takes_the_same_files(self, mutual, ca):
        """The client for asyncio takes the same files."""
        mine = ca.issue("mine")
        async with AsyncClient(
            mutual.address, ca=ca.file, cert=mine.certificate, key=mine.key
        ) as client:
            assert ANSWER == (await client.complete("hi")).text

    def test_client_without_certificate_is_not_served(self, mutual, ca):
        """A client that shows no certificate gets no connection."""
        with (
            Client(mutual.address, ca=ca.file, retry=NO_RETRY) as client,
            pytest.raises(PeerUnavailable),
        ):
            client.complete("hi", deadline_s=PATIENCE_S)

    def test_unusable_files_are_refused_at_once(self, ca, tmp_path):
        """A missing CA, half a pair and credentials beside files are errors before any call."""
        with pytest.raises(InvalidConfig, match="cannot read"):
            Client("127.0.0.1:1", ca=tmp_path / "none.pem")
        with pytest.raises(InvalidConfig, match="cert and key together"):
            Client("127.0.0.1:1", cert=ca.file)
        both = ChannelOptions(credentials=grpc.ssl_channel_credentials())
        with pytest.raises(InvalidConfig, match="give one of both"):
            Client("127.0.0.1:1", ca=ca.file, options=both)

    def test_name_in_the_certificate_may_differ(self, ca):
        """With `server_name` the certificate needs that name instead of the address."""
        pair = ca.issue("named", "tandem.internal")
        files = ServerTls(certificate=pair.certificate, key=pair.key)
        with (
            fake_server(server_credentials(files)) as running,
            Client(running.address, ca=ca.file, server_name="tandem.internal") as client,
        ):
            assert ANSWER == client.complete("hi").text


class TestSeveralServers:
    def test_calls_take_turns(self):
        """With two addresses both servers get calls."""
        with fake_server() as one, fake_server() as two:
            with Client([one.address, two.address]) as client:
                for _ in range(50):
                    client.complete("hi")
                    if one.seen.complete and two.seen.complete:
                        break
            assert one.seen.complete
            assert two.seen.complete

    def test_calls_go_on_where_one_server_is_gone(self):
        """A server that does not listen gets no call while another one does."""
        gone = f"127.0.0.1:{free_port()}"
        with fake_server() as one, Client(f"{gone},{one.address}") as client:
            assert [ANSWER] * 3 == [client.complete("hi").text for _ in range(3)]

    @pytest.mark.parametrize(
        ("address", "why"),
        [
            ("one:1,two:2", "has no IP address"),
            ("1.2.3.4:1,[::1]:2", "IPv4 and IPv6"),
            ("1.2.3.4:1,", "is empty"),
        ],
    )
    def test_addresses_that_are_no_target_are_refused(self, address, why):
        """Several addresses are IP addresses of one kind; the error says what to give instead."""
        with pytest.raises(InvalidConfig, match=why):
            Client(address)

    def test_encrypted_ones_need_a_name(self, ca):
        """Several addresses have no name for their certificates, so it must be given."""
        with pytest.raises(InvalidConfig, match="give server_name"):
            Client("1.2.3.4:1,1.2.3.5:1", ca=ca.file)

    def test_targets(self):
        """One address is a target as it stands, several become one of gRPC's."""
        assert "host:1" == target_of("host:1")
        assert "unix:/tmp/a,b" == target_of("unix:/tmp/a,b")
        assert "ipv4:1.2.3.4:1,1.2.3.5:2" == target_of("1.2.3.4:1, 1.2.3.5:2")
        assert "ipv6:[::1]:1,[::2]:2" == target_of("[::1]:1,[::2]:2")

    def test_extra_options_win(self):
        """Channel arguments of the caller come after ours."""
        extra = ("grpc.max_receive_message_length", 5)
        assert extra == ChannelOptions(extra_options=(extra,)).grpc_options("host:1")[-1]
