"""The check of the contract notices changes that would break an older client or executor."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROTOS = ROOT / "protos"


def _buf() -> str | None:
    """Return the path of the buf that deploy/local/test installs, else of any buf on the path."""
    text = (ROOT / "deploy/local/test").read_text()
    version = re.search(r"^BUF_VERSION=(\S+)$", text, re.MULTILINE)
    assert version is not None
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    cached = cache / f"tandem/buf-{version[1]}/node_modules/.bin/buf"
    return str(cached) if cached.exists() else shutil.which("buf")


@pytest.fixture
def breaking(tmp_path):
    """
    Return a function: the exit code and output of buf after a replacement in a file of the
    contract.
    """
    buf = _buf()
    if buf is None and "CI" not in os.environ:
        pytest.skip("buf is not installed: deploy/local/test installs it where npm is there")

    def check(file, old, new):
        shutil.copytree(PROTOS / "tandem", tmp_path / "tandem")
        shutil.copy(PROTOS / "buf.yaml", tmp_path)
        path = tmp_path / "tandem" / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        command = [buf, "breaking", str(tmp_path), "--against", str(PROTOS / "baseline.binpb")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    return check


class TestBreaking:
    @pytest.mark.parametrize(
        ("file", "old", "new", "what"),
        [
            (
                "executor/v1/batch.proto",
                "fixed64 state_hash = 4;",
                "uint64 state_hash = 4;",
                "type",
            ),
            ("executor/v1/batch.proto", "bytes row_start = 4;", "bytes row_start = 44;", "deleted"),
            ("executor/v1/session.proto", "uint32 lease_ms = 4;", "", "deleted"),
            ("executor/v1/executor_service.proto", "rpc Describe(", "rpc Tell(", "deleted"),
            (
                "inference/v1/request.proto",
                "optional uint64 seed = 4;",
                "uint64 seed = 4;",
                "cardinality",
            ),
        ],
    )
    def test_break_is_noticed(self, breaking, file, old, new, what):
        """
        A changed type, number, name or presence of an existing field or call is refused, and named.
        """
        code, said = breaking(file, old, new)
        assert code != 0
        assert what in said

    def test_addition_passes(self, breaking):
        """
        A new field is no breaking change.
        """
        added = "uint32 lease_ms = 4;\n  // Says nothing.\n  uint32 unused = 400;"
        assert (0, "") == breaking("executor/v1/session.proto", "uint32 lease_ms = 4;", added)
