"""The scripted streams of clients/conformance, replayed with the clients of this repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict

from tandem.common.v1.finish_reason_pb2 import FinishReason
from tandem.inference.v1 import inference_service_pb2 as inference
from tandem.inference.v1.resume_pb2 import Resume
from tests.clients.python.conformance.players import (
    Case,
    Outcome,
    complete_in_loop,
    complete_in_thread,
    readme_program,
    stream_in_loop,
    stream_in_thread,
)
from tests.clients.python.conformance.scripted_server import (
    PATIENCE_S,
    Script,
    encoded,
    scripted_server,
)

FOLDER = Path(__file__).resolve().parents[4] / "clients/conformance"
CASES = json.loads((FOLDER / "streams.json").read_text())
STREAMS, ANSWERS = CASES["generate"], CASES["complete"]

KEYS = {
    "case": {"name", "says", "request", "client", "calls", "result"},
    "client": {"cancel_after_deltas", "deadline_ms"},
    "call": {"expect", "send", "answer", "hang", "end"},
    "end": {"code", "message", "reason", "metadata", "field", "retry_after_ms"},
    "result": {"choices", "output_tokens", "error"},
    "error": {"code", "reason", "message", "field", "metadata", "found_by_client"},
}
"""Keys that the README explains; a client would pass over a misspelt one."""


def cases(of: list[Case]) -> Any:
    return pytest.mark.parametrize("case", of, ids=[case["name"] for case in of])


def request_of(values: dict[str, Any]) -> inference.GenerateRequest:
    return ParseDict(values, inference.GenerateRequest())


def by_choice(resume: Resume) -> list[tuple[int, list[int], bool]]:
    """Return what is resumed, by choice: a client may list choices in any order."""
    return sorted((one.choice, list(one.token_ids), one.finished) for one in resume.choices)


def check_fields(values: dict[str, Any], seen: inference.GenerateRequest) -> None:
    """Check that a request has these fields; of its params others may be set too."""
    wanted = request_of({name: value for name, value in values.items() if value is not None})
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
            assert by_choice(ours) == by_choice(theirs)
        else:
            assert ours == theirs, name


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
        check_fields(always, seen)
        check_fields(call.get("expect", {}), seen)
        assert (left_s is not None) == seen.HasField("time_limit_s")
        if left_s is not None:
            assert 0.001 <= seen.time_limit_s <= left_s
            left_s = seen.time_limit_s
    keys = {seen.attempt_key for seen in script.seen}
    assert 1 == len(keys)
    assert len(script.seen) == 1 or "" not in keys
    if case["calls"][-1].get("hang"):
        assert script.cancelled.wait(PATIENCE_S)


def check_outcome(case: Case, outcome: Outcome) -> None:
    """Check that the caller got the result of the case."""
    result = case["result"]
    by_number = sorted(outcome.choices.values(), key=lambda choice: choice["choice"])
    assert result["choices"] == by_number
    assert result.get("output_tokens") == outcome.output_tokens
    wanted, error = result.get("error"), outcome.error
    assert (wanted is None) == (error is None), error
    if wanted is None or error is None:
        return
    code = error.metadata.get("grpc_code")
    assert (wanted["reason"], wanted["code"]) == (
        (error.reason, error.code) if code is None else (None, code)
    )
    for name in {"message", "field", "metadata"} & wanted.keys():
        assert wanted[name] == getattr(error, name)


class TestPythonClient:
    @pytest.mark.parametrize("play", [stream_in_thread, stream_in_loop])
    @cases(STREAMS)
    def test_stream_is_as_promised(self, case, play):
        """
        The client sends the calls of the case and gives its caller the result, in threads and in a loop.
        """
        for times in (1, 6, 60):
            with scripted_server(case["calls"]) as script:
                outcome = play(script.address, with_deadline(case, times))
                if not script.seen:  # a slow machine had not made the call by its deadline
                    continue
                check_calls(case, script)
            check_outcome(case, outcome)
            return
        pytest.fail("no call was made")

    @pytest.mark.parametrize("play", [complete_in_thread, complete_in_loop])
    @cases(ANSWERS)
    def test_whole_answer_is_as_promised(self, case, play):
        """
        A call of `Complete` is repeated, or raised, as the case says.
        """
        with scripted_server(case["calls"]) as script:
            outcome = play(script.address, case)
            check_calls(case, script)
        check_outcome(case, outcome)


class TestProgramOfTheReadme:
    @cases([case for case in STREAMS if "deadline_ms" not in case.get("client", {})])
    def test_program_does_as_promised(self, case):
        """
        The program that protos/README shows sends the same calls, and prints the text of the result.
        """
        with scripted_server(case["calls"]) as script:
            printed = readme_program(script.address, case)
            check_calls(case, script)
        result = case["result"]
        texts = {choice: text for choice, text in printed.texts.items() if text}
        assert {one["choice"]: one["text"] for one in result["choices"] if one["text"]} == texts
        assert result.get("output_tokens") == printed.output_tokens
        error = result.get("error")
        assert (error is None) == (printed.error is None), printed.error
        if error is not None and not error.get("found_by_client"):
            assert printed.error.startswith(f"{error['reason'] or error['code']}: ")


class TestData:
    def test_names_are_unique_and_keys_are_known(self):
        """
        No two cases share a name, and each key is one that the README explains.
        """
        names = [case["name"] for case in STREAMS + ANSWERS]
        assert len(names) == len(set(names))
        for case in STREAMS + ANSWERS:
            parts = {
                "case": [case],
                "client": [case.get("client", {})],
                "call": case["calls"],
                "end": [call["end"] for call in case["calls"] if "end" in call],
                "result": [case["result"]],
                "error": [case["result"].get("error", {})],
            }
            for kind, values in parts.items():
                assert set() == {key for value in values for key in value} - KEYS[kind]

    def test_cases_have_every_event_and_every_finish_reason(self):
        """
        Each kind of event and each finish reason of the contract comes in some case.
        """
        sent = [
            inference.GenerateResponse.FromString(encoded(message))
            for case in STREAMS
            for call in case["calls"]
            for message in call["send"]
        ]
        kinds = {message.WhichOneof("event") for message in sent}
        events = inference.GenerateResponse.DESCRIPTOR.oneofs_by_name["event"].fields
        assert {None, *(event.name for event in events)} == kinds
        reasons = {message.finished.reason for message in sent if message.HasField("finished")}
        assert set(FinishReason.values()) - {0} == reasons - {99}

    def test_every_key_is_explained(self):
        """
        The README of the folder names each key.
        """
        text = (FOLDER / "README.md").read_text()
        explained = {key for keys in KEYS.values() for key in keys if f"`{key}`" in text}
        assert {key for keys in KEYS.values() for key in keys} == explained
