"""Certificates and API keys on the command line: the same options of every command."""

from __future__ import annotations

import pytest

from tandem.network.tls import server_credentials
from tandem.network.tls_files import ServerTls
from tandem_client.cli.app import COMMANDS, load
from tandem_client.cli.doctor import check_security
from tandem_client.cli.shared.access import ACCESS_OPTIONS
from tests.certificates import Authority
from tests.clients.python.fake_server import ANSWER, fake_server

CALLING = (
    "generate",
    "chat",
    "batch",
    "top",
    "requests",
    "profile",
    "doctor",
    "drain",
    "suspend",
    "resume",
    "abort",
    "models",
    "show",
    "tokenize",
    "detokenize",
)


@pytest.fixture
def mutual(tmp_path):
    """Yield a server that asks for certificates, and the options of a command that it serves."""
    ca = Authority(tmp_path)
    pair, mine = ca.issue("server"), ca.issue("mine")
    files = ServerTls(certificate=pair.certificate, key=pair.key, client_ca=ca.file)
    options = ("--ca", str(ca.file), "--cert", str(mine.certificate), "--key", str(mine.key))
    with fake_server(server_credentials(files)) as running:
        yield running, options


@pytest.mark.parametrize("name", CALLING)
def test_every_command_that_calls_a_server_takes_the_options(name):
    """Each command that calls a server has all options of one definition."""
    assert name in COMMANDS
    assert set(ACCESS_OPTIONS) <= {param.name for param in load(name).params}


@pytest.mark.slow
def test_command_calls_over_mutual_tls_with_a_key(mutual, run, monkeypatch):
    """Commands for clients and for operators use certificates and key of options and variables."""
    server, options = mutual
    monkeypatch.setenv("TANDEM_ADDRESS", server.address)
    monkeypatch.setenv("TANDEM_ADMIN_ADDRESS", server.address)

    generated = run("generate", "hi", *options, "--api-key", "sesame")
    drained = run("requests", "--json", *options)
    refused = run("requests")

    assert (0, True) == (generated.exit_code, ANSWER in generated.output)
    assert 0 == drained.exit_code
    assert 3 == refused.exit_code
    assert f"{server.address} does not answer in plain text, as it speaks TLS" in refused.stderr
    assert "give --ca FILE" in refused.stderr
    assert "Bearer sesame" in {seen.get("authorization") for seen in server.seen.metadata}


def test_half_a_pair_is_wrong_usage(run):
    """A certificate without its key ends the command before it calls."""
    result = run("generate", "hi", "--address", "127.0.0.1:1", "--cert", "one.pem")

    assert 2 == result.exit_code
    assert "cert and key together" in result.output


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"listen": "127.0.0.1:1", "executor": "unix:/x"}, []),
        ({"listen": "0.0.0.0:1"}, ["nothing on it is authenticated or encrypted"]),
        ({"listen": "0.0.0.0:1", "tls_cert": "a"}, ["nothing on it is authenticated:"]),
        ({"listen": "0.0.0.0:1", "tokens_file": "a"}, ["nothing on it is encrypted"]),
        ({"listen": "0.0.0.0:1", "tls_cert": "a", "tokens_file": "b"}, []),
        ({"admin_listen": "0.0.0.0:1", "admin_tls_cert": "a", "tls_client_ca": "b"}, []),
        ({"metrics_listen": "0.0.0.0:1", "tls_cert": "a", "tokens_file": "b"}, ["authenticated"]),
        (
            {
                "metrics_listen": "0.0.0.0:1",
                "metrics_tls_cert": "a",
                "metrics_token_file": "b",
            },
            [],
        ),
        ({"executor": "10.0.0.7:1"}, ["not encrypted or authenticated"]),
        ({"executor": "10.0.0.7:1,127.0.0.1:2", "executor_ca": "a"}, ["not authenticated"]),
        ({"executor": "10.0.0.7:1", "executor_ca": "a", "link_token_file": "b"}, []),
    ],
)
def test_doctor_says_what_protection_is_lacking(settings, found):
    """The doctor warns of each address that others can reach, with what it lacks."""
    facts = [one.fact for one in check_security(settings)]

    assert len(found) == len(facts)
    for part, fact in zip(found, facts, strict=True):
        assert part in fact
