"""Addresses that can be no server's are refused before anything connects."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tandem.errors import InvalidConfig
from tandem.network.address import check_server_address
from tandem_client import AdminClient, AsyncClient, Client, is_serving
from tandem_client.cli.app import app

WRONG = [
    ("", "is empty: give HOST:PORT, for example 127.0.0.1:50051"),
    ("  ", "is empty: give HOST:PORT"),
    ("localhost", "has no port: give HOST:PORT, for example localhost:50051"),
    ("[::1]", "has no port: give HOST:PORT, for example [::1]:50051"),
    ("::1", "or, with IPv6, [::1]:50051"),
    ("::1:50051", "or, with IPv6, [::1]:50051"),
    (":50051", "has no host: give HOST:PORT, for example 127.0.0.1:50051"),
    ("127.0.0.1:", "has no port from 1 to 65535"),
    ("127.0.0.1:http", "has no port from 1 to 65535"),
    ("127.0.0.1:0", "has no port from 1 to 65535"),
    ("127.0.0.1:99999", "has no port from 1 to 65535"),
    ("127.0.0.1:\N{ARABIC-INDIC DIGIT ONE}", "has no port from 1 to 65535"),
    ("127.0.0.1:50051 ", "has no port from 1 to 65535"),
    ("my host:50051", "has no valid host"),
    ("a:1,b:2", "is no HOST:PORT"),
    ("http://box:50051/v1", "is a URL: give HOST:PORT, for example box:50051, without http://"),
    ("https://box", "is a URL: give HOST:PORT, for example box:50051, without https://"),
    ("unix:", "names nothing to connect to"),
]
RIGHT = ["localhost:50051", "10.0.0.7:1", "[::1]:65535", "unix:/tmp/s", "dns:///box:1", "a-b.c:2"]


class TestCheckAddress:
    @pytest.mark.parametrize(("address", "hint"), WRONG)
    def test_wrong_address_is_told_what_to_write(self, address, hint):
        """
        An address that is none is refused in one sentence with an example of a right one.
        """
        with pytest.raises(InvalidConfig) as refused:
            check_server_address(address)

        assert refused.value.message.startswith(f"the address {address!r} ")
        assert hint in refused.value.message

    @pytest.mark.parametrize("address", RIGHT)
    def test_right_address_stays_as_it_is(self, address):
        """
        An address that gRPC can resolve is passed on unchanged.
        """
        assert address == check_server_address(address)


class TestEveryEntrance:
    def test_clients_refuse_at_once(self):
        """
        Each client refuses a wrong address when it is made, the health check when it is asked.
        """
        for connect in (
            Client,
            AsyncClient,
            AdminClient,
            lambda address: is_serving(address, "", timeout_s=1.0),
        ):
            with pytest.raises(InvalidConfig, match="has no port"):
                connect("localhost")

    @pytest.mark.parametrize(
        "command",
        [
            "generate hi --address",
            "chat --address",
            "doctor --address",
            "doctor --admin-address",
            "top --once --admin-address",
            "requests --admin-address",
            "profile --admin-address",
            "drain --admin-address",
            "suspend --admin-address",
            "resume --admin-address",
            "cache flush --admin-address",
            "config advise --admin-address",
            "config --live",
        ],
    )
    def test_commands_exit_with_usage(self, command):
        """
        Every command that takes an address ends with exit code 2 and one line that says HOST:PORT.
        """
        result = CliRunner().invoke(app, [*command.split(), "http://localhost:1"])

        assert (2, 1) == (result.exit_code, result.stderr.count("\n"))
        assert "give HOST:PORT, for example localhost:1, without http://" in result.stderr
