"""The file in which a process tells where it listens."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tandem.errors import InvalidConfig
from tandem.process.ready_file import write_ready_file


def write_in_turn(path, addresses):
    """Write files with one address and the other many times."""
    for number in range(300):
        write_ready_file(path, {"address": addresses[number % len(addresses)]})


def read(path):
    """Return the address in a file; raises an error if it is not whole."""
    return json.loads(path.read_text())["address"]


class TestWriteReadyFile:
    def test_file_has_the_addresses_and_the_pid(self, tmp_path):
        """
        The file is one JSON object: each address by its name, null for one that is not there, and the pid.
        """
        path = tmp_path / "ready.json"
        write_ready_file(path, {"address": "127.0.0.1:7", "metrics_address": None})
        assert {"address": "127.0.0.1:7", "metrics_address": None, "pid": os.getpid()} == (
            json.loads(path.read_text())
        )
        assert ["ready.json"] == [one.name for one in tmp_path.iterdir()]

    def test_reader_of_a_file_that_is_written_again_finds_a_whole_one(self, tmp_path):
        """
        While the file is replaced again and again, every read finds one of its contents whole.
        """
        path = tmp_path / "ready.json"
        addresses = ["a" * 10_000, "b"]
        write_ready_file(path, {"address": addresses[0]})
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write_in_turn, path, addresses)
            seen = {read(path)}
            while not writing.done():
                seen.add(read(path))
            writing.result()
        assert seen <= set(addresses)

    def test_file_that_cannot_be_replaced_leaves_no_other(self, tmp_path):
        """
        The unfinished file goes when it cannot take its place.
        """
        path = tmp_path / "folder"
        path.mkdir()
        with pytest.raises(InvalidConfig):
            write_ready_file(path, {"address": "127.0.0.1:7"})
        assert [path] == list(tmp_path.iterdir())

    @pytest.mark.parametrize("place", ["none/ready.json", "file/ready.json", "folder"])
    def test_place_that_cannot_be_written_is_named(self, tmp_path, place):
        """
        A path below no folder, below a file, or of a folder is an InvalidConfig that names setting and path.
        """
        (tmp_path / "file").write_text("")
        (tmp_path / "folder").mkdir()
        with pytest.raises(InvalidConfig, match=f"^ready_file: {tmp_path / place}: "):
            write_ready_file(tmp_path / place, {"address": "127.0.0.1:7"})
