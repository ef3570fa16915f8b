"""Scripted streams of clients/conformance, replayed with the program that protos/README shows."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import ParseDict

from tandem.inference.v1 import inference_service_pb2 as inference
from tandem.inference.v1 import inference_service_pb2_grpc as inference_grpc
from tests.clients.conformance.cases import STREAMS, Case, check_calls
from tests.clients.conformance.programs import ROOT
from tests.clients.conformance.scripted_server import scripted_server

PROTOS_README = ROOT / "protos/README.md"
PATIENT = [case for case in STREAMS if "deadline_ms" not in case.get("client", {})]


@dataclass
class Printed:
    """Result of the program of protos/README: text by choice, and the words of its error."""

    texts: dict[int, str] = field(default_factory=dict)
    output_tokens: int | None = None
    error: str | None = None


def readme_program(address: str, case: Case) -> Printed:
    """Play a case of Generate with the program of protos/README, which then never sleeps."""
    (source,) = re.findall(r"```python\n(.*?)```", PROTOS_README.read_text(), re.DOTALL)
    program: dict[str, Any] = {"__name__": "client"}
    exec(compile(source, "protos/README.md", "exec"), program)
    program["time"] = SimpleNamespace(sleep=lambda _seconds: None)
    printed, num_deltas = Printed(), 0
    last = case.get("client", {}).get("cancel_after_deltas")
    with grpc.insecure_channel(address) as channel:
        stub = inference_grpc.InferenceServiceStub(channel)
        request = ParseDict(case["request"], inference.GenerateRequest())
        pieces = program["generate"](stub, request)
        try:
            while num_deltas != last:
                choice, text = next(pieces)
                printed.texts[choice] = printed.texts.get(choice, "") + text
                num_deltas += 1
        except StopIteration as end:
            printed.output_tokens = end.value.usage.output_tokens
        except (RuntimeError, AssertionError) as error:
            printed.error = str(error)
        pieces.close()
    return printed


class TestProgramOfTheReadme:
    @pytest.mark.parametrize("case", PATIENT, ids=[case["name"] for case in PATIENT])
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
