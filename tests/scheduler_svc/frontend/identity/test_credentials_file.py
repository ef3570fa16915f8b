"""The file of credentials: what it says, and what is refused of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler_svc.core.request.tenant import TenantLimits
from scheduler_svc.frontend.identity.credentials_file import read_credentials
from scheduler_svc.frontend.identity.identity import Identity, Role
from tandem.bearer_token import new_token, token_hash
from tandem.errors import InvalidConfig
from tests.scheduler_svc.frontend.identity.credentials import USER, credentials, write_file

TOML = f"""
[tenants.acme]
max_requests = 64
max_queued_tokens = 200_000
tokens_per_minute = 1_000_000
weight = 2.5

[[credentials]]
name = "acme-batch"
token_sha256 = "{token_hash("batch")}"
tenant = "acme"
roles = ["generate"]
highest_priority = 5

[[credentials]]
name = "on-call"
certificate = "oncall.example"
roles = ["operate", "generate", "delegate"]
"""


def changed(**changes: object) -> list[dict[str, object]]:
    """Return the usual credentials, with another first one; None leaves a key out."""
    first, *rest = credentials()
    merged = {key: value for key, value in (first | changes).items() if value is not None}
    return [merged, *rest]


class TestContent:
    def test_toml_says_identities_and_limits(self, tmp_path):
        """
        Each entry is an identity, found by its token or certificate, with its tenant's limits.
        """
        path = tmp_path / "tokens.toml"
        path.write_text(TOML)
        table = read_credentials(path)
        batch, on_call = table.of_token("batch"), table.of_certificate(["x", "oncall.example"])
        assert batch is not None
        assert on_call is not None
        assert (
            Identity(
                name="acme-batch",
                tenant="acme",
                roles=frozenset({Role.GENERATE}),
                highest_priority=5,
            )
            == batch.identity
        )
        assert frozenset(Role) == on_call.identity.roles
        assert ("", 0) == (on_call.identity.tenant, on_call.identity.highest_priority)
        limits = TenantLimits(
            max_requests=64, max_queued_tokens=200_000, tokens_per_minute=1_000_000, weight=2.5
        )
        assert limits == on_call.limits_of("acme")
        assert None is on_call.limits_of("globex")

    def test_json_has_the_same_shape(self, tmp_path):
        """
        A file whose name ends in .json is JSON.
        """
        caller = read_credentials(write_file(tmp_path)).of_token(USER)
        assert caller is not None
        assert ("user", "acme") == (caller.identity.name, caller.identity.tenant)

    @pytest.mark.parametrize("token", ["", "user-tokem", token_hash(USER), "é" * 5])
    def test_unknown_token_is_of_no_caller(self, tmp_path, token):
        """
        Only the token itself is known: not another one, and not the hash that the file has.
        """
        assert None is read_credentials(write_file(tmp_path)).of_token(token)

    def test_unknown_certificate_is_of_no_caller(self, tmp_path):
        """
        A certificate with other names proves nothing.
        """
        table = read_credentials(write_file(tmp_path))
        assert None is table.of_certificate(["", "*.acme.example", "acme.example"])


class TestRefusals:
    @pytest.mark.parametrize(
        ("entries", "why"),
        [
            (changed(token_sha256="ABC"), "credential 'user': token_sha256 must be 64 hex"),
            (changed(token_sha256=token_hash("x").upper()), "token_sha256 must be 64 hex"),
            (changed(token_sha256=None, certificate=None), "'user': needs token_sha256, certificate"),
            (changed(tenant=None), "'user': tenant must have 1 to 128"),
            (changed(tenant="a\nb"), "'user': tenant must have 1 to 128"),
            (changed(roles=[]), "'user': roles must not be empty"),
            (changed(roles=["admin"]), "Invalid enum value 'admin'"),
            (changed(highest_priority=2**31), "highest_priority must be a number of 32 bits"),
            (changed(highest_priority="0"), "Expected `int`, got `str`"),
            (changed(expires="2027-01-01"), "Invalid RFC3339 encoded datetime"),
            (changed(expires="2027-01-01T00:00:00"), "Expected `datetime` with a timezone"),
            (changed(name=""), "the name of a credential must have"),
            (changed(name="other"), "two credentials have the name 'other'"),
            (changed(tokens="x"), "unknown field `tokens`"),
            (changed(token_sha256=token_hash("other-token")), "'other': token_sha256 is that of 'user'"),
            (changed(certificate=""), "certificate must have 1 to 128"),
        ],
    )  # fmt: skip
    def test_wrong_entry_is_named(self, tmp_path, entries, why):
        """
        A wrong value is refused with the name of its credential or key.
        """
        path = write_file(tmp_path, entries)
        with pytest.raises(InvalidConfig, match=why) as refused:
            read_credentials(path)
        assert str(path) in refused.value.message

    @pytest.mark.parametrize(
        ("limits", "why"),
        [({"max_requests": 0}, "tenant 'acme': max_requests is 0"),
         ({"weight": 0.0}, "tenant 'acme': weight is 0.0"),
         ({"max_tokens": 1}, "unknown field `max_tokens`")],
    )  # fmt: skip
    def test_wrong_limit_is_named(self, tmp_path, limits, why):
        """
        A limit out of range is refused with the name of its tenant.
        """
        with pytest.raises(InvalidConfig, match=why):
            read_credentials(write_file(tmp_path, tenants={"acme": limits}))

    @pytest.mark.parametrize(
        ("name", "content", "why"),
        [("a.toml", b"[[credentials]\n", "cannot be decoded"),
         ("a.json", b"{", "cannot be decoded"),
         ("a.toml", b"\xff", "is no UTF-8 text"),
         ("a.toml", b"", "missing required field `credentials`")],
    )  # fmt: skip
    def test_file_that_is_no_table_is_refused(self, tmp_path, name, content, why):
        """
        A file that cannot be decoded, or has no credentials, is refused.
        """
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InvalidConfig, match=why):
            read_credentials(tmp_path / name)

    def test_missing_file_is_refused(self):
        """
        A file that is not there is refused by its path.
        """
        with pytest.raises(InvalidConfig, match=r"/no/such\.toml: cannot be read"):
            read_credentials(Path("/no/such.toml"))


class TestTokens:
    def test_each_new_token_differs_and_fits_metadata(self):
        """
        Tokens are printable, begin alike and never repeat.
        """
        made = {new_token() for _ in range(100)}
        assert 100 == len(made)
        assert all(one.startswith("tdm_") and one.isascii() and len(one) == 47 for one in made)

    def test_hash_is_plain_sha256(self):
        """
        The hash is what `sha256sum` of the token says, so that any tool can make an entry.
        """
        assert "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae" == token_hash(
            "foo"
        )
