"""Flags of the gateway of `tandem up`, by what the scheduler's public port asks for."""

from __future__ import annotations

import pytest

from tandem.errors import InvalidConfig
from tandem_client.cli.up.banner import needed_to_call
from tandem_client.cli.up.protected_gateway import gateway_arguments

TLS = {"tls_cert": "a.pem", "tls_key": "b.pem"}
CALLS = ["--scheduler-ca=ca.pem", "--scheduler-cert=c.pem", "--scheduler-key=d.pem"]


def test_plain_port_adds_nothing():
    """
    Without TLS the gateway gets the flags that the user gave.
    """
    assert ["--cors-origins=*"] == gateway_arguments({}, ["--cors-origins=*"])


def test_gateway_listens_with_the_public_certificate():
    """
    With TLS the gateway serves HTTPS with the same files, before the user's own flags.
    """
    expected = ["--tls-cert=a.pem", "--tls-key=b.pem", *CALLS]
    assert expected == gateway_arguments({**TLS, "tls_client_ca": "ca.pem"}, CALLS)


@pytest.mark.parametrize(
    ("settings", "given", "lacking"),
    [
        (TLS, [], "--scheduler-ca=FILE"),
        ({**TLS, "tls_client_ca": "ca.pem"}, CALLS[:1], "--scheduler-cert=FILE"),
        ({**TLS, "tls_client_ca": "ca.pem"}, CALLS[:2], "--scheduler-key=FILE"),
    ],
)
def test_lacking_file_is_asked_for_by_its_flag(settings, given, lacking):
    """
    A gateway that could not call the port is refused, with the flag to give.
    """
    with pytest.raises(InvalidConfig, match=f"--gateway-arg={lacking}"):
        gateway_arguments(settings, given)


def test_announcement_says_what_calls_need():
    """
    One line says which options every command needs to call the server, if there are any.
    """
    assert [] == needed_to_call({})
    assert ["(calls need --ca FILE)"] == needed_to_call(TLS)
    assert ["(calls need a token in TANDEM_API_KEY)"] == needed_to_call({"tokens_file": "x"})
