"""Directories of schedulers that live and of those that died."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from scheduler_svc.process.scratch import ScratchDirectory


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch) -> Path:
    """Return a temporary directory of the system for this test alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def age(directory: Path) -> None:
    """Make the directory look two minutes old."""
    then = directory.stat().st_mtime - 120
    os.utime(directory, (then, then))


class TestScratchDirectory:
    def test_is_private_and_goes_with_its_owner(self, temporary):
        """
        A scratch directory can be entered by this user alone and is removed with everything in it.
        """
        scratch = ScratchDirectory()
        assert 0o700 == scratch.path.stat().st_mode & 0o777
        (scratch.path / "models").mkdir()
        scratch.remove()
        assert [] == list(temporary.iterdir())

    def test_what_a_killed_process_left_is_removed(self, temporary):
        """
        A directory of a process that was killed is removed when the next one starts; a live one's
        stays.
        """
        code = (
            "import os, signal, sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
            "from scheduler_svc.process.scratch import ScratchDirectory\n"
            "kept = ScratchDirectory(); os.kill(os.getpid(), signal.SIGKILL)"
        )
        subprocess.run([sys.executable, "-c", code, str(temporary)], check=False)
        (abandoned,) = temporary.iterdir()
        age(abandoned)
        first = ScratchDirectory()
        assert [first.path] == list(temporary.iterdir())
        age(first.path)
        second = ScratchDirectory()
        assert {first.path, second.path} == set(temporary.iterdir())
        first.remove()
        second.remove()

    def test_what_is_not_ours_is_left_alone(self, temporary):
        """
        Young directories, ones without a lock, and files and links with similar names stay.
        """
        for name in ("tandem-young", "tandem-unlocked"):
            (temporary / name).mkdir()
        (temporary / "tandem-young" / "lock").touch()
        (temporary / "tandem-file").touch()
        (temporary / "tandem-link").symlink_to(temporary / "tandem-unlocked")
        age(temporary / "tandem-unlocked")
        before = set(temporary.iterdir())
        scratch = ScratchDirectory()
        assert before | {scratch.path} == set(temporary.iterdir())
        scratch.remove()
