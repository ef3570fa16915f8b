"""Settings of the step link's TLS and token, in both services."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor_svc.config import settings as executor
from scheduler_svc.config import settings as scheduler
from tandem.errors import InvalidConfig
from tandem.network.link_security import check_executors
from tandem.network.tls_files import ClientTls, ServerTls

MODEL = ("--model", "some/dir")


def test_variables_of_one_service_are_no_mistake_in_the_other():
    """
    One environment may serve both services: `TANDEM_EXECUTOR_CA` is the scheduler's, though
    variables of the executor begin like it, and the client's are neither's.
    """
    environ = {
        "TANDEM_EXECUTOR_CA": "ca.pem",
        "TANDEM_EXECUTOR_CERT": "scheduler.pem",
        "TANDEM_EXECUTOR_KEY": "scheduler-key.pem",
        "TANDEM_EXECUTOR_TLS_CERT": "executor.pem",
        "TANDEM_EXECUTOR_TLS_KEY": "executor-key.pem",
        "TANDEM_ADDRESS": "server:50051",
        "TANDEM_API_KEY": "token",
    }

    ours = scheduler.load_settings((), environ).settings
    theirs = executor.load_settings(MODEL, environ).settings

    assert ours.executor_tls == ClientTls(
        ca=Path("ca.pem"), certificate=Path("scheduler.pem"), key=Path("scheduler-key.pem")
    )
    assert theirs.tls == ServerTls(certificate=Path("executor.pem"), key=Path("executor-key.pem"))


def test_one_file_gives_both_services_the_token(tmp_path):
    """The token's file is one setting of a file for both services."""
    config = tmp_path / "both.json"
    config.write_text('{"link_token_file": "/etc/token", "executor_ca": "ca.pem"}')
    flags = ("--config", str(config))

    assert scheduler.load_settings(flags, {}).settings.link_token_file == Path("/etc/token")
    assert executor.load_settings((*MODEL, *flags), {}).settings.link_token_file == Path(
        "/etc/token"
    )


def test_one_file_allows_both_services_an_insecure_link(tmp_path):
    """The switch is off, and one key of a file for both services turns it on in both."""
    config = tmp_path / "both.toml"
    config.write_text("insecure_link = true")
    for load, own in ((scheduler.load_settings, ()), (executor.load_settings, MODEL)):
        assert not load(own, {}).settings.insecure_link
        assert load((*own, "--config", str(config)), {}).settings.insecure_link
        assert load((*own, "--insecure-link"), {}).settings.insecure_link


@pytest.mark.parametrize(
    ("load", "flags"),
    [
        (executor.load_settings, (*MODEL, "--tls-cert", "one.pem")),
        (executor.load_settings, (*MODEL, "--tls-client-ca", "one.pem")),
        (scheduler.load_settings, ("--executor-key", "one.pem")),
    ],
    ids=["certificate-alone", "client-ca-alone", "key-alone"],
)
def test_half_a_pair_is_refused_where_settings_are_read(load, flags):
    """A certificate without its key is a mistake before anything starts."""
    with pytest.raises(InvalidConfig, match="together"):
        load(flags, {})


class TestExecutors:
    @pytest.mark.parametrize(
        "addresses",
        [
            ["127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/s.sock"],
            ["127.1:1"],
        ],
    )
    def test_those_of_this_machine_need_nothing(self, addresses):
        """Loopback, localhost and unix sockets are called without a proof."""
        check_executors(addresses, is_authenticated=False, insecure_link=False)

    @pytest.mark.parametrize(
        ("addresses", "away"),
        [
            (["10.0.0.7:1"], "10.0.0.7:1"),
            (["executor:1"], "executor:1"),
            (["dns:///executor:1"], "dns:///executor:1"),
            (["[2001:db8::1]:1"], "[2001:db8::1]:1"),
            (["127.0.0.1:1", "10.0.0.7:1", "unix:/s", "spare:2"], "10.0.0.7:1, spare:2"),
        ],
        ids=["address", "name", "dns", "ipv6", "list"],
    )
    def test_others_need_a_proof_even_as_spares(self, addresses, away):
        """Each address of another machine in a list counts, and a name may be one of another."""
        with pytest.raises(InvalidConfig) as refused:
            check_executors(addresses, is_authenticated=False, insecure_link=False)
        assert "executor" == refused.value.field
        assert refused.value.message.startswith(f"executor: {away} cannot")
        for part in ("link_token_file", "executor_cert", "insecure_link"):
            assert part in refused.value.message
        check_executors(addresses, is_authenticated=True, insecure_link=False)
        check_executors(addresses, is_authenticated=False, insecure_link=True)
