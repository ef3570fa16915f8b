"""The data of clients/conformance: its cases, its page, and its committed results."""

from __future__ import annotations

from tandem.common.v1.finish_reason_pb2 import FinishReason
from tandem.inference.v1 import inference_service_pb2 as inference
from tests.clients.conformance.cases import ANSWERS, FOLDER, STREAMS
from tests.clients.conformance.programs import PROGRAMS
from tests.clients.conformance.scenarios import SCENARIOS
from tests.clients.conformance.scripted_server import encoded
from tests.clients.conformance.table import PASSED, RESULTS, scenarios, table_of

KEYS = {
    "case": {"name", "says", "request", "client", "calls", "result"},
    "client": {"cancel_after_deltas", "deadline_ms"},
    "call": {"expect", "send", "answer", "hang", "end"},
    "end": {"code", "message", "reason", "metadata", "field", "retry_after_ms"},
    "result": {"choices", "output_tokens", "error"},
    "error": {"code", "reason", "message", "field", "metadata", "found_by_client"},
    "scenario": {
        "name",
        "says",
        "services",
        "without",
        "hold",
        "commands",
        "when",
        "then",
        "wait_s",
        "asked",
        "asked_result",
        "idle",
        "result",
        "later",
        "later_result",
    },
}
"""Keys that the README explains; a client would pass over a misspelt one."""


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
        assert set() == {key for one in SCENARIOS for key in one} - KEYS["scenario"]

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


class TestResults:
    def test_every_client_passed_every_scenario(self):
        """
        The page has a row for each scenario and a column for each client, and each cell is green.
        """
        programs = [one.name for one in PROGRAMS]
        names = [name for part in scenarios().values() for name in part]
        all_passed = {(program, name): True for program in programs for name in names}
        page = RESULTS.read_text()
        wanted = table_of(all_passed, dict.fromkeys(programs, PASSED)).split("## Versions")[0]
        assert wanted == page.split("## Versions")[0]

    def test_scenarios_have_names_of_their_own(self):
        """
        No two scenarios share a name.
        """
        names = [name for part in scenarios().values() for name in part]
        assert len(names) == len(set(names))

    def test_every_client_names_its_versions(self):
        """
        The page says for each client which compiler and packages it was tested with.
        """
        rows = RESULTS.read_text().split("## Versions")[1].splitlines()
        told = dict(row.strip("| ").split(" | ", 1) for row in rows if row.startswith("| "))
        for program in PROGRAMS:
            assert any(letter.isdigit() for letter in told[program.name])
