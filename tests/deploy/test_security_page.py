"""The page on security: its file of credentials and its options are those of the services."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scheduler_svc.frontend.identity.credentials_file import read_credentials
from tandem.bearer_token import token_hash
from tandem.settings.options import flag_of, keys_of

SERVICES = ("scheduler", "executor")
PAGE = Path(__file__).parents[2] / "deploy/security.md"
OF_COMMANDS = {"--tenant", "--role", "--highest-priority", "--expires"} | {
    *("--openai", "--gateway-arg", "--scheduler-ca", "--scheduler-cert", "--scheduler-key")
}
"""Flags of `tandem token`, `tandem up` and its gateway, which the page names too."""


@pytest.fixture
def text() -> str:
    return PAGE.read_text()


def test_file_of_credentials_can_be_used(tmp_path, text):
    """
    The example of a tokens file is one that a service takes, with the identities it tells of.
    """
    path = tmp_path / "tokens.toml"
    path.write_text(re.search(r"```toml\n(.*?)```", text, re.DOTALL)[1])
    table = read_credentials(path)
    search, batch = table.of_token("test"), table.of_certificate(["batch.internal.example"])
    assert token_hash("test") in path.read_text()
    assert ("search", 0) == (search.identity.tenant, search.identity.highest_priority)
    assert ("search", 5) == (batch.identity.tenant, batch.identity.highest_priority)
    assert 64 == search.limits_of("search").max_requests


def test_options_are_those_of_the_services(text):
    """
    Every flag that the page names is one of a service, of `tandem token`, or of `tandem up`.
    """
    named = {*re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)}
    known = {flag_of(name) for service in SERVICES for name in keys_of(service)}
    assert named - OF_COMMANDS <= known
