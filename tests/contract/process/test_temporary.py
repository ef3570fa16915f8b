"""Folders for the sockets and files of processes."""

from __future__ import annotations

import shutil
import tempfile
from types import SimpleNamespace

import pytest

from tandem.errors import InvalidConfig
from tandem.process import temporary
from tandem.process.temporary import MIN_FREE_BYTES, temporary_folder

SOCKET = "ipc/core.sock"


@pytest.fixture
def places(tmp_path_factory, monkeypatch):
    """
    Yield TMPDIR and the place that is always short; each has room unless its name is in `full`.
    """
    base = tmp_path_factory.getbasetemp().parent
    first, short = base / "first", base / "short"
    full = set()
    for place in (first, short):
        place.mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(first))
    monkeypatch.setattr(temporary, "_ALWAYS_SHORT", (str(short),))

    def usage(place):
        return SimpleNamespace(free=MIN_FREE_BYTES - 1 if place.name in full else MIN_FREE_BYTES)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    yield SimpleNamespace(first=first, short=short, full=full)
    for place in (first, short):
        shutil.rmtree(place)


class TestTemporaryFolder:
    def test_place_that_was_set_is_taken(self, places):
        """
        A folder of this user alone is made in TMPDIR.
        """
        folder = temporary_folder("t-", SOCKET)
        assert (places.first, 0o700) == (folder.parent, folder.stat().st_mode & 0o777)

    def test_long_path_falls_back_to_a_short_one(self, places, monkeypatch):
        """
        A folder is made elsewhere if a socket below TMPDIR would have too long a path.
        """
        long = places.first / ("x" * 100)
        long.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        assert places.short == temporary_folder("t-", SOCKET).parent

    def test_full_disk_falls_back_to_another(self, places):
        """
        A folder is made elsewhere if TMPDIR has no room for a tokenizer.
        """
        places.full.add("first")
        assert places.short == temporary_folder("t-", SOCKET).parent

    def test_no_place_is_one_sentence_with_all_reasons(self, places):
        """
        An error for lack of any place says what is wrong with each, and what to set.
        """
        places.full |= {"first", "short"}
        with pytest.raises(InvalidConfig) as refused:
            temporary_folder("t-", SOCKET)

        assert (
            f"no place for temporary files: {places.first} has less than 16 MiB of room; "
            f"{places.short} has less than 16 MiB of room: set TMPDIR to a folder with room and a "
            "short path" == refused.value.message
        )
