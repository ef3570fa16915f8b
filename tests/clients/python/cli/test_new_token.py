"""`tandem token`: what it prints is an entry that a service takes."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest
from typer.testing import CliRunner

from scheduler_svc.frontend.identity.credentials_file import read_credentials
from scheduler_svc.frontend.identity.identity import Role
from tandem_client.cli.app import app


def run(*arguments: str):
    return CliRunner().invoke(app, ["token", *arguments])


class TestEntry:
    def test_service_knows_the_token_by_its_entry(self, tmp_path):
        """
        Entries appended one after the other are a tokens file, in which each token is found.
        """
        path = tmp_path / "tokens.toml"
        printed = [
            run("user", "--tenant", 'a "b" ü', "--highest-priority", "-3"),
            run("boss", "--role", "operate", "--role", "generate", "--role", "delegate"),
        ]
        path.write_text("".join(one.stdout for one in printed))
        table = read_credentials(path)
        user, boss = (
            table.of_token(re.search(r"tdm_\S+", one.stderr)[0]).identity for one in printed
        )
        assert ("user", 'a "b" ü', frozenset({Role.GENERATE}), -3) == (
            user.name,
            user.tenant,
            user.roles,
            user.highest_priority,
        )
        assert ("boss", "", frozenset(Role)) == (boss.name, boss.tenant, boss.roles)

    @pytest.mark.parametrize("given", ["2027-01-02", "2027-01-02T01:00:00+01:00"])
    def test_time_of_expiry_is_in_utc_unless_it_has_an_offset(self, tmp_path, given):
        """
        A service reads the time that `--expires` says.
        """
        path = tmp_path / "tokens.toml"
        printed = run("x", "--role", "operate", "--expires", given)
        path.write_text(printed.stdout)
        found = read_credentials(path).of_token(re.search(r"tdm_\S+", printed.stderr)[0])
        assert datetime(2027, 1, 2, tzinfo=UTC).timestamp() == found.identity.expires_s

    def test_token_is_not_in_the_entry(self):
        """
        Only the hash goes to stdout.
        """
        assert "tdm_" not in run("x", "--role", "operate").stdout

    @pytest.mark.parametrize(
        ("arguments", "why"),
        [(["x"], "--tenant is needed"), (["a\nb", "--tenant", "t"], "NAME must have printable")],
    )
    def test_entry_that_no_service_takes_is_not_made(self, arguments, why):
        """
        An entry that would be refused is refused here, with exit code 2.
        """
        ended = run(*arguments)
        assert (2, "") == (ended.exit_code, ended.stdout)
        assert why in ended.stderr
