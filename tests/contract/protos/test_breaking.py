"""The check of the contract notices changes that would break an older client or executor."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROTOS = ROOT / "protos"
BUF = ROOT / "deploy/local/buf"
CANNOT_RUN = 75
"""Exit status of deploy/local/buf where npm cannot install it."""


@pytest.fixture
def breaking(tmp_path):
    """
    Return a function: the exit code and output of buf after a replacement in a file of the
    contract.
    """

    def check(file, old, new):
        shutil.copytree(PROTOS / "tandem", tmp_path / "tandem")
        shutil.copy(PROTOS / "buf.yaml", tmp_path)
        path = tmp_path / "tandem" / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        command = [str(BUF), "breaking", str(tmp_path), "--against", str(PROTOS / "baseline.binpb")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == CANNOT_RUN and "CI" not in os.environ:
            pytest.skip(f"NOT TESTED: {done.stderr.strip()}")
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
            (
                "inference/v1/inference_service.proto",
                "optional int32 priority = ",
                "int32 priority = ",
                "cardinality",
            ),
            (
                "inference/v1/stream.proto",
                "uint32 prompt_tokens = ",
                "optional uint32 prompt_tokens = ",
                "cardinality",
            ),
            (
                "inference/v1/request.proto",
                '"io.tandem.inference.v1"',
                '"com.example.inference.v1"',
                "java_package",
            ),
            (
                "admin/v1/stats.proto",
                "java_multiple_files = true",
                "java_multiple_files = false",
                "java_multiple_files",
            ),
            ("common/v1/errors.proto", "/common/v1;commonv1", "/common/v1;errors", "go_package"),
            (
                "common/v1/errors.proto",
                '"Tandem.Common.V1"',
                '"Tandem.Errors"',
                "csharp_namespace",
            ),
        ],
    )
    def test_break_is_noticed(self, breaking, file, old, new, what):
        """
        A changed type, number, name or presence of an existing field or call is refused, and named;
        so is a changed name of the package that a file becomes in another language.
        """
        code, said = breaking(file, old, new)
        assert code != 0
        assert what in said

    @pytest.mark.parametrize(
        ("file", "old", "added"),
        [
            (
                "executor/v1/session.proto",
                "uint32 lease_ms = 4;",
                "\n  // Says nothing.\n  uint32 unused = 400;",
            ),
            (
                "common/v1/errors.proto",
                "ERROR_REASON_UNSPECIFIED = 0;",
                "\n  // Never sent.\n  ERROR_REASON_UNUSED = 400;",
            ),
            (
                "inference/v1/inference_service.proto",
                "Progress progress = 2;",
                "\n    // Never sent.\n    Done unused = 400;",
            ),
        ],
        ids=["field", "reason", "event"],
    )
    def test_addition_passes(self, breaking, file, old, added):
        """
        A new field, error reason or event is no breaking change.
        """
        assert (0, "") == breaking(file, old, old + added)
