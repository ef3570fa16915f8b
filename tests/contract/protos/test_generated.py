"""Generated code matches the protos that it comes from."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

PROTOS = Path(__file__).resolve().parents[3] / "protos"


def check(protos: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(protos / "generate.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


class TestGeneratedCode:
    def test_committed_code_is_current(self):
        """
        Regenerating from the protos changes nothing.
        """
        done = check(PROTOS)
        assert (0, "") == (done.returncode, done.stderr)

    def test_stale_code_is_noticed(self, tmp_path):
        """
        A proto changed without regenerating, and a module without a proto, each fail the check.
        """
        shutil.copytree(PROTOS, tmp_path / "protos")
        proto = tmp_path / "protos/tandem/common/v1/finish_reason.proto"
        proto.write_text(proto.read_text().replace("CANCELLED = 7", "CANCELLED = 77"))
        (tmp_path / "protos/python/tandem/common/v1/orphan_pb2.py").write_text("")
        done = check(tmp_path / "protos")
        stale = {line for line in done.stderr.splitlines() if line.startswith("stale: ")}
        assert 1 == done.returncode
        assert {
            "stale: protos/python/tandem/common/v1/finish_reason_pb2.py",
            "stale: protos/python/tandem/common/v1/orphan_pb2.py",
        } == stale
