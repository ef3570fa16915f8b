"""Credentials that are read again when their file changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from scheduler_svc.frontend.identity.credential_store import LOOK_INTERVAL_S, CredentialStore
from tandem.error_codes import Unauthenticated
from tandem.errors import InvalidConfig
from tests.scheduler_svc.frontend.identity.credentials import OTHER, USER, credentials, write_file


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> CredentialStore:
    return CredentialStore(write_file(tmp_path), clock)


def known(store: CredentialStore) -> list[bool]:
    """Return whether the tokens of both users are known."""
    return [store.table().of_token(token) is not None for token in (USER, OTHER)]


class TestReload:
    def test_changed_file_is_in_force_after_a_look(self, store, clock, tmp_path):
        """
        A new file is used from the next look on; what it leaves out is no longer known.
        """
        write_file(tmp_path, credentials()[:1])
        assert [True, True] == known(store)
        clock.now_s += LOOK_INTERVAL_S
        assert [True, False] == known(store)

    def test_broken_file_is_logged_once_and_the_one_before_stays(self, store, clock, tmp_path):
        """
        A file that cannot be used changes nothing and is logged once; the next good one is used.
        """
        (tmp_path / "tokens.json").write_text("{")
        with capture_logs() as logs:
            for _ in range(3):
                clock.now_s += LOOK_INTERVAL_S
                assert [True, True] == known(store)
        assert ["files_refused"] == [line["event"] for line in logs]
        write_file(tmp_path, credentials()[:1])
        clock.now_s += LOOK_INTERVAL_S
        assert [True, False] == known(store)

    def test_removed_file_changes_nothing(self, store, clock, tmp_path):
        """
        Without a file the credentials before it stay; a file that is there again is used.
        """
        (tmp_path / "tokens.json").unlink()
        clock.now_s += LOOK_INTERVAL_S
        assert [True, True] == known(store)
        write_file(tmp_path, credentials()[1:])
        clock.now_s += LOOK_INTERVAL_S
        assert [False, True] == known(store)

    def test_broken_file_at_the_start_is_refused(self, tmp_path, clock):
        """
        A store cannot begin without usable credentials.
        """
        (tmp_path / "tokens.json").write_text("{")
        with pytest.raises(InvalidConfig, match="cannot be decoded"):
            CredentialStore(tmp_path / "tokens.json", clock)


class TestExpiry:
    @pytest.mark.parametrize(
        ("unix_s", "is_refused"), [(1577934244.9, False), (1577934245.0, True)]
    )
    def test_credential_is_refused_from_its_time_on(self, tmp_path, clock, unix_s, is_refused):
        """
        A credential proves its caller before the time of its entry, and is refused from then on.
        """
        entries = [one | {"expires": "2020-01-02T04:04:05+01:00"} for one in credentials()]
        store = CredentialStore(write_file(tmp_path, entries), clock, lambda: unix_s)

        def ask() -> str:
            caller = store.caller(lambda table: table.of_token(USER))
            return "" if caller is None else caller.identity.name

        if not is_refused:
            assert "user" == ask()
            return
        with pytest.raises(Unauthenticated, match="'user' expired at 2020-01-02T03:04:05"):
            ask()
