"""Every rpc of the contract says whether it may be repeated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PROTOS = Path(__file__).resolve().parents[3] / "protos/tandem"
RPC = re.compile(r"((?: *//.*\n)+) *rpc (\w+)\(")


def rpcs() -> dict[str, str]:
    """Return the comment of each rpc as one line."""
    found = {}
    for path in sorted(PROTOS.rglob("*_service.proto")):
        for comment, name in RPC.findall(path.read_text()):
            words = re.sub(r"^ *// ?", "", comment, flags=re.MULTILINE).split()
            found[f"{path.parent.parent.name}.{name}"] = " ".join(words)
    return found


RPCS = rpcs()


def test_all_rpcs_are_found():
    """
    The pattern above sees each rpc of every service.
    """
    texts = [path.read_text() for path in PROTOS.rglob("*.proto")]
    assert sum(len(re.findall(r"^ *rpc ", text, re.MULTILINE)) for text in texts) == len(RPCS)


@pytest.mark.parametrize("rpc", RPCS)
def test_rpc_says_whether_it_may_be_repeated(rpc):
    """
    The comment has exactly one sentence that begins with "Idempotent:" or "Not idempotent:".
    """
    assert 1 == len(re.findall(r"(?:\. |^)(?:Idempotent|Not idempotent): \w", RPCS[rpc]))
