"""Forms of addresses, which services and clients read alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.errors import InvalidConfig
from tandem.network.address import (
    check_listen_address,
    check_targets,
    check_tcp_address,
    host_and_port,
    names_this_machine,
    unix_path,
    without_brackets,
)


class TestParts:
    @pytest.mark.parametrize(
        ("address", "expected"),
        [
            ("box:1", ("box", 1)),
            ("[::1]:65535", ("[::1]", 65_535)),
            ("0.0.0.0:0", ("0.0.0.0", 0)),
            ("box:00080", ("box", 80)),
        ],
    )
    def test_host_and_port_are_taken_apart(self, address, expected):
        """
        The host stays as it is written, and the port is a number from 0 to 65535.
        """
        assert expected == host_and_port(address)

    @pytest.mark.parametrize(
        "address",
        [
            *("", "box", ":1", "box:", "box:http", "box:65536", "box:-1", "box:1 ", "unix:/s"),
            *("box:\N{SUPERSCRIPT TWO}", "box:\N{ARABIC-INDIC DIGIT ONE}", f"box:{'1' * 5000}"),
        ],
    )
    def test_other_forms_are_refused(self, address):
        """
        An address without a host, or without a port in ASCII digits up to 65535, has no parts.
        """
        with pytest.raises(InvalidConfig, match="is not an address of the form host:port"):
            host_and_port(address)

    def test_sockets_take_hosts_without_brackets(self):
        """
        The brackets of an IPv6 host are no part of it.
        """
        assert ["::1", "box"] == [without_brackets(host) for host in ("[::1]", "box")]

    @pytest.mark.parametrize("address", ["unix:/run/s", "unix:///run/s"])
    def test_path_follows_the_prefix(self, address):
        """
        Both forms of an absolute path name the same socket.
        """
        assert Path("/run/s") == unix_path(address)


class TestSettings:
    @pytest.mark.parametrize("address", ["box:1", "[::1]:1", "unix:/s"])
    def test_address_to_listen_on_stays_as_it_is(self, address):
        """
        HOST:PORT and unix:PATH are addresses on which a service can listen.
        """
        assert address == check_listen_address(address)

    @pytest.mark.parametrize(
        ("check", "address", "expected"),
        [
            (check_listen_address, "box", "must be HOST:PORT or unix:PATH"),
            (check_listen_address, "::1:1", "or unix:PATH, an IPv6 host in brackets"),
            (check_tcp_address, "unix:/s", "must be HOST:PORT, an IPv6 host in brackets"),
            (check_targets, "a:1,b", "must be HOST:PORT or unix:PATH"),
            (check_targets, "a:1, a:1", "must not name an address twice"),
        ],
    )
    def test_rule_is_named(self, check, address, expected):
        """
        An address that breaks a rule is refused with that rule.
        """
        with pytest.raises(ValueError, match=expected):
            check(address)

    def test_spaces_between_targets_are_removed(self):
        """
        Several addresses to connect to are separated by commas, with or without spaces.
        """
        assert "a:1,unix:/s" == check_targets(" a:1, unix:/s")


class TestThisMachine:
    @pytest.mark.parametrize(
        ("address", "expected"),
        [
            ("127.0.0.1:1", True),
            ("127.8.8.8:1", True),
            ("127.1:1", True),
            ("10.1:1", False),
            ("[::1]:1", True),
            ("localhost:1", True),
            ("unix:/run/tandem", True),
            ("0.0.0.0:1", False),
            ("127.example:1", False),
            ("localhost.example:1", False),
            ("[fe80::1%eth0]:1", False),
            ("dns:///box", False),
        ],
    )
    def test_address_of_this_machine_is_told_by_its_form(self, address, expected):
        """
        A socket, a loopback address and localhost are this machine; other names are never looked up.
        """
        assert expected is names_this_machine(address)
