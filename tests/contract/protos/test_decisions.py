"""The page of decisions: what it names is in the contract, under the numbers that it tells."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tandem.common.v1.errors_pb2 import ErrorReason
from tandem.common.v1.finish_reason_pb2 import FinishReason
from tandem.inference.v1 import (
    batch_pb2,
    chat_pb2,
    inference_service_pb2,
    model_pb2,
    request_pb2,
    resume_pb2,
    stream_pb2,
    tokens_pb2,
)
from tests.contract.languages.stubs import LANGUAGES

PAGE = Path(__file__).resolve().parents[3] / "protos/decisions.md"
FILES = [
    *(batch_pb2, chat_pb2, inference_service_pb2, model_pb2, request_pb2, resume_pb2, stream_pb2),
    tokens_pb2,
]
FIELDS = {
    f"{message.name}.{field.name}": field.number
    for file in FILES
    for message in file.DESCRIPTOR.message_types_by_name.values()
    for field in message.fields
}
EVENTS = {
    field.name: field.number
    for field in inference_service_pb2.GenerateResponse.DESCRIPTOR.oneofs_by_name["event"].fields
}
VALUES = {
    name.removeprefix(prefix): number
    for enum, prefix in ((FinishReason, "FINISH_REASON_"), (ErrorReason, "ERROR_REASON_"))
    for name, number in enum.items()
}
NUMBERED = re.compile(r"`([\w.]+)` \((\d+)\)")
FIELD = re.compile(r"`([A-Z]\w+\.[a-z_]+)`")


@pytest.fixture
def text() -> str:
    return PAGE.read_text()


def test_numbers_are_those_of_the_contract(text):
    """
    Each field, event and reason with a number in parentheses has this number in the contract.
    """
    told = NUMBERED.findall(text)
    known = FIELDS | EVENTS | VALUES
    assert [] == [(name, number) for name, number in told if known.get(name) != int(number)]
    assert len(told) > len(VALUES)


def test_fields_are_in_the_contract(text):
    """
    Each field that the page names by its message is there, and has its number beside it once.
    """
    named = set(FIELD.findall(text))
    assert named <= FIELDS.keys()
    assert named <= {name for name, _ in NUMBERED.findall(text)}


def test_table_has_all_languages(text):
    """
    The table of stubs has a line for each language that is tried, all with the same messages.
    """
    rows = re.findall(r"^\| (\w+) \| (\d+) \|", text, re.MULTILINE)
    assert [*LANGUAGES] == [language for language, _ in rows]
    assert 1 == len({messages for _, messages in rows})
