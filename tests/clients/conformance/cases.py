"""Cases of clients/conformance/streams.json, and checks of what a client made of one."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf.json_format import ParseDict

from tandem.inference.v1 import inference_service_pb2 as inference
from tandem.inference.v1.resume_pb2 import Resume
from tests.clients.conformance.programs import ROOT
from tests.clients.conformance.scripted_server import PATIENCE_S, Script

FOLDER = ROOT / "clients/conformance"
Case = dict[str, Any]
_ALL = json.loads((FOLDER / "streams.json").read_text())
STREAMS: list[Case] = _ALL["generate"]
ANSWERS: list[Case] = _ALL["complete"]


def with_deadline(case: Case, times: int) -> Case:
    """Return the case with a deadline so many times as long, if it has one."""
    client = case.get("client", {})
    if "deadline_ms" not in client:
        return case
    return {**case, "client": {**client, "deadline_ms": times * client["deadline_ms"]}}


def check_calls(case: Case, script: Script) -> None:
    """Check that the server got the calls of the case, and nothing else."""
    assert len(case["calls"]) == len(script.seen)
    always = {name: value for name, value in case["request"].items() if name != "time_limit_s"}
    left_s = case["request"].get("time_limit_s")
    for call, seen in zip(case["calls"], script.seen, strict=True):
        _check_fields(always | call.get("expect", {}), seen)
        assert (left_s is not None) == seen.HasField("time_limit_s")
        if left_s is not None:
            assert 0.001 <= seen.time_limit_s <= left_s
            left_s = seen.time_limit_s
    keys = {seen.attempt_key for seen in script.seen}
    assert 1 == len(keys)
    assert len(script.seen) == 1 or "" not in keys
    if case["calls"][-1].get("hang"):
        assert script.cancelled.wait(PATIENCE_S)


def check_result(case: Case, result: dict[str, Any]) -> None:
    """Check that a program printed the result of the case."""
    wanted = case["result"]
    assert wanted["choices"] == result["choices"]
    assert wanted.get("output_tokens") == result.get("output_tokens")
    expected, error = wanted.get("error"), result.get("error")
    assert (expected is None) == (error is None), error
    if expected is None or error is None:
        return
    told = {"code", "reason", "message", "field", "metadata"}
    if expected.get("found_by_client"):  # it may word it as its language does
        told = {"code", "reason"}
    for name in told & expected.keys():
        assert expected[name] == error[name], name


def _check_fields(values: dict[str, Any], seen: inference.GenerateRequest) -> None:
    """Check that a request has these fields; of its params others may be set too."""
    given = {name: value for name, value in values.items() if value is not None}
    wanted = ParseDict(given, inference.GenerateRequest())
    for name, value in values.items():
        assert (value is not None) == seen.HasField(name), name
        if value is None:
            continue
        ours, theirs = getattr(wanted, name), getattr(seen, name)
        if name in {"sampling", "stopping"}:
            for param in value:
                assert getattr(ours, param) == getattr(theirs, param), param
                if ours.DESCRIPTOR.fields_by_name[param].has_presence:
                    assert theirs.HasField(param), param
        elif name == "resume":
            assert _by_choice(ours) == _by_choice(theirs)
        else:
            assert ours == theirs, name


def _by_choice(resume: Resume) -> list[tuple[int, list[int], bool]]:
    """Return what is resumed, by choice: a client may list choices in any order."""
    return sorted((one.choice, list(one.token_ids), one.finished) for one in resume.choices)
