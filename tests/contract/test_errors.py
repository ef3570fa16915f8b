"""The error table: one class per reason, with the code that the contract promises."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import grpc
import pytest

from tandem import status
from tandem.admin.v1 import admin_service_pb2
from tandem.common.v1 import errors_pb2
from tandem.error_codes import ERROR_BY_CODE, TandemError
from tandem.errors import ERROR_BY_REASON
from tandem.inference.v1 import inference_service_pb2

PREFIX = "ERROR_REASON_"
PROTO = Path(status.__file__).parents[2] / "tandem/common/v1/errors.proto"
REASONS = [
    name.removeprefix(PREFIX)
    for name in errors_pb2.ErrorReason.keys()  # noqa: SIM118  # an enum wrapper is no dict
    if name != "ERROR_REASON_UNSPECIFIED"
]
README = Path(__file__).parents[2] / "README.md"
SERVICES = (inference_service_pb2, admin_service_pb2)
LOCAL = {status.PeerUnavailable, status.CallCancelled, *ERROR_BY_CODE.values()} - {
    *ERROR_BY_REASON.values()
}
"""Classes that are never sent: a caller makes them of an answer that carries no reason."""


def documented() -> dict[str, tuple[str, str]]:
    """Return code and comment of every reason, read from the proto file."""
    entry = re.compile(r"((?:^ *//.*\n)+) *ERROR_REASON_(\w+) = \d+;", re.MULTILINE)
    found = {}
    for comment, reason in entry.findall(PROTO.read_text()):
        text = " ".join(line.strip().removeprefix("//").strip() for line in comment.splitlines())
        found[reason] = (re.split(r"[ .]", text)[0], text)
    return found


def sent_to_clients() -> set[str]:
    """Return the reasons that rpcs of the public and the admin service name as theirs."""
    return {
        errors_pb2.ErrorReason.Name(number).removeprefix(PREFIX)
        for module in SERVICES
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        for number in method.GetOptions().Extensions[errors_pb2.reasons].reasons
    }


def all_classes(root: type[TandemError] = TandemError) -> list[type[TandemError]]:
    """
    Return classes of the shared package; a service or client may have more, which are never sent,
    and `status` makes one, which no module names, for each reason of a newer server that it meets.
    """
    children = [
        cls
        for cls in root.__subclasses__()
        if cls.__module__.startswith("tandem.") and cls.__name__ != "NewerError"
    ]
    return [*children, *(leaf for child in children for leaf in all_classes(child))]


class TestErrorTable:
    @pytest.mark.parametrize("reason", REASONS)
    def test_reason_has_one_class_with_its_documented_code(self, reason):
        """
        Every ErrorReason has exactly one class, with the first word of its comment as gRPC code.
        """
        classes = [cls for cls in all_classes() if cls.reason == reason and cls not in LOCAL]
        assert [ERROR_BY_REASON[reason]] == classes
        assert documented()[reason][0] == classes[0].code

    @pytest.mark.parametrize("reason", REASONS)
    def test_retry_advice_is_the_documented_one(self, reason):
        """
        An error tells by default when to retry if, and only if, its comment says RetryInfo.
        """
        promised = "with RetryInfo" in documented()[reason][1]
        assert promised == (ERROR_BY_REASON[reason].default_retry_after_s is not None)

    def test_no_class_is_outside_the_table(self):
        """
        Every class that can be sent has a reason of the contract, and each reason one class.
        """
        sendable = [cls for cls in all_classes() if cls not in LOCAL]
        assert Counter(REASONS) == Counter(cls.reason for cls in sendable)

    @pytest.mark.parametrize("cls", all_classes(), ids=lambda cls: cls.__name__)
    def test_code_is_a_grpc_code(self, cls):
        """
        Every class's code names a gRPC status code that is not OK.
        """
        assert grpc.StatusCode[cls.code] is not grpc.StatusCode.OK

    def test_every_code_has_one_class_above_those_of_its_reasons(self):
        """
        Each code but OK has one class, from which each class of a reason with this code derives.
        """
        codes = {code.name for code in grpc.StatusCode if code is not grpc.StatusCode.OK}
        assert codes == ERROR_BY_CODE.keys()
        for cls in all_classes():
            assert issubclass(cls, ERROR_BY_CODE[cls.code])

    def test_readme_tells_what_to_do_after_each_reason(self):
        """
        The table of errors in the README has each reason that clients can meet, at its status.
        """
        rows = re.findall(
            r"^\| ([A-Z_]+) \| ([A-Z_, ]+) \| .+ \|$", README.read_text(), re.MULTILINE
        )
        told = {(reason, code) for code, reasons in rows for reason in reasons.split(", ")}
        assert {(reason, ERROR_BY_REASON[reason].code) for reason in sent_to_clients()} <= told
        assert [] == [row for row in told if ERROR_BY_REASON[row[0]].code != row[1]]

    def test_passed_deadline_is_a_timeout_of_python_too(self):
        """
        A passed deadline is caught by `except TimeoutError`, and keeps its message and details.
        """
        error = ERROR_BY_CODE["DEADLINE_EXCEEDED"]("late", metadata={"key": "value"})
        assert isinstance(error, TimeoutError)
        assert ("late", {"key": "value"}) == (str(error), error.metadata)

    def test_retry_advice_can_be_given_per_error(self):
        """
        An explicit retry time replaces the class's own.
        """
        cls = ERROR_BY_REASON["QUEUE_FULL"]
        assert (1.0, 2.5) == (
            cls("full").retry_after_s,
            cls("full", retry_after_s=2.5).retry_after_s,
        )

    def test_numbers_are_stable(self):
        """
        A reason's number in the contract never changes; new reasons get new numbers.
        """
        expected = {
            "INVALID_PARAMETER": 1,
            "EMPTY_PROMPT": 2,
            "PROMPT_TOO_LONG": 3,
            "TOTAL_TOO_LONG": 4,
            "NEVER_FITS": 5,
            "CHAT_TEMPLATE": 6,
            "FEATURE_UNSUPPORTED": 7,
            "REQUEST_NOT_FOUND": 10,
            "DUPLICATE_REQUEST_ID": 11,
            "EVENTS_NOT_TRACKED": 12,
            "PROFILE_RUNNING": 13,
            "PROFILE_UNSUPPORTED": 14,
            "MODEL_NOT_FOUND": 15,
            "QUEUE_FULL": 20,
            "MEMORY_PRESSURE": 21,
            "SLOW_CONSUMER": 22,
            "RESPONSE_TOO_LARGE": 23,
            "NO_EXECUTOR": 30,
            "EXECUTOR_LOST": 31,
            "DRAINING": 32,
            "MODEL_CHANGED": 33,
            "HANDED_OVER": 34,
            "EXECUTOR_LOADING": 35,
            "CORE_TIMEOUT": 36,
            "INVALID_LOGITS": 40,
            "INTERNAL": 41,
            "POISON_REQUEST": 42,
            "SESSION_HELD": 50,
            "SESSION_LOST": 51,
            "INCOMPATIBLE_EXECUTOR": 52,
            "STREAM_REPLACED": 53,
            "CORRUPT_MESSAGE": 54,
            "INVALID_CONFIG": 60,
            "INVALID_MODEL": 61,
            "OUT_OF_MEMORY": 62,
            "ADDRESS_IN_USE": 63,
            "UNAUTHENTICATED": 70,
            "PERMISSION_DENIED": 71,
        }
        numbers = {
            name.removeprefix(PREFIX): number for name, number in errors_pb2.ErrorReason.items()
        }
        assert {**expected, "UNSPECIFIED": 0} == numbers
