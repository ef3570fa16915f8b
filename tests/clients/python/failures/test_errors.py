"""Class, retry, exit code and sentence of each reason of the contract's table in this client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import pytest
import typer

from tandem import errors
from tandem.error_codes import DeadlineExceeded, TandemError
from tandem.errors import ERROR_BY_REASON
from tandem.status import CallCancelled, PeerUnavailable
from tandem_client import NO_RETRY, AsyncClient, Client, RetryPolicy
from tandem_client.cli.shared.failures import ExitCode, readable_errors
from tandem_client.streams.retry import is_transient
from tests.clients.python.fake_server import ANSWER, Act

SOON = RetryPolicy(max_attempts=3, initial_delay_s=0.001, max_delay_s=0.001)
MESSAGE = "it was wrong:\n do better"


class Fate(NamedTuple):
    """Outcome of a failure of one reason."""

    raised: type[TandemError]
    is_retried: bool
    exit_code: ExitCode


FATES = {
    "INVALID_PARAMETER": Fate(errors.InvalidParameter, False, ExitCode.REFUSED),
    "EMPTY_PROMPT": Fate(errors.EmptyPrompt, False, ExitCode.REFUSED),
    "PROMPT_TOO_LONG": Fate(errors.PromptTooLong, False, ExitCode.REFUSED),
    "TOTAL_TOO_LONG": Fate(errors.TotalTooLong, False, ExitCode.REFUSED),
    "NEVER_FITS": Fate(errors.NeverFits, False, ExitCode.REFUSED),
    "CHAT_TEMPLATE": Fate(errors.ChatTemplateError, False, ExitCode.REFUSED),
    "FEATURE_UNSUPPORTED": Fate(errors.FeatureUnsupported, False, ExitCode.REFUSED),
    "MODEL_NOT_FOUND": Fate(errors.ModelNotFound, False, ExitCode.REFUSED),
    "RESPONSE_TOO_LARGE": Fate(errors.ResponseTooLarge, False, ExitCode.REFUSED),
    "REQUEST_NOT_FOUND": Fate(errors.RequestNotFound, False, ExitCode.REFUSED),
    "DUPLICATE_REQUEST_ID": Fate(errors.DuplicateRequestId, False, ExitCode.REFUSED),
    "EVENTS_NOT_TRACKED": Fate(errors.EventsNotTracked, False, ExitCode.REFUSED),
    "PROFILE_RUNNING": Fate(errors.ProfileRunning, False, ExitCode.REFUSED),
    "PROFILE_UNSUPPORTED": Fate(errors.ProfileUnsupported, False, ExitCode.REFUSED),
    "QUEUE_FULL": Fate(errors.QueueFull, True, ExitCode.OVERLOADED),
    "MEMORY_PRESSURE": Fate(errors.MemoryPressure, True, ExitCode.OVERLOADED),
    "SLOW_CONSUMER": Fate(errors.SlowConsumer, False, ExitCode.FAILED),
    "NO_EXECUTOR": Fate(errors.NoExecutor, True, ExitCode.UNAVAILABLE),
    "EXECUTOR_LOST": Fate(errors.ExecutorLost, True, ExitCode.UNAVAILABLE),
    "DRAINING": Fate(errors.Draining, True, ExitCode.UNAVAILABLE),
    "HANDED_OVER": Fate(errors.HandedOver, True, ExitCode.UNAVAILABLE),
    "EXECUTOR_LOADING": Fate(errors.ExecutorLoading, True, ExitCode.UNAVAILABLE),
    "CORE_TIMEOUT": Fate(errors.CoreTimeout, True, ExitCode.UNAVAILABLE),
    "MODEL_CHANGED": Fate(errors.ModelChanged, False, ExitCode.UNAVAILABLE),
    "INVALID_LOGITS": Fate(errors.InvalidLogits, False, ExitCode.FAILED),
    "INTERNAL": Fate(errors.InternalError, False, ExitCode.FAILED),
    "POISON_REQUEST": Fate(errors.PoisonRequest, False, ExitCode.FAILED),
    "SESSION_HELD": Fate(errors.SessionHeld, False, ExitCode.REFUSED),
    "SESSION_LOST": Fate(errors.SessionLost, False, ExitCode.FAILED),
    "INCOMPATIBLE_EXECUTOR": Fate(errors.IncompatibleExecutor, False, ExitCode.REFUSED),
    "STREAM_REPLACED": Fate(errors.StreamReplaced, False, ExitCode.REFUSED),
    "CORRUPT_MESSAGE": Fate(errors.CorruptMessage, False, ExitCode.FAILED),
    "INVALID_CONFIG": Fate(errors.InvalidConfig, False, ExitCode.USAGE),
    "INVALID_MODEL": Fate(errors.InvalidModel, False, ExitCode.USAGE),
    "OUT_OF_MEMORY": Fate(errors.OutOfMemory, False, ExitCode.USAGE),
    "ADDRESS_IN_USE": Fate(errors.AddressInUse, False, ExitCode.UNAVAILABLE),
    "UNAUTHENTICATED": Fate(errors.Unauthenticated, False, ExitCode.REFUSED),
    "PERMISSION_DENIED": Fate(errors.PermissionDenied, False, ExitCode.REFUSED),
}
"""Each reason that a server can send."""

LOCAL = {
    "PEER_UNAVAILABLE": Fate(PeerUnavailable, True, ExitCode.UNAVAILABLE),
    "CALL_CANCELLED": Fate(CallCancelled, False, ExitCode.CANCELLED),
    "DEADLINE_EXCEEDED": Fate(DeadlineExceeded, False, ExitCode.CANCELLED),
}
"""Reasons that this client gives where no typed answer came."""

Ask = Callable[[str, RetryPolicy], str]
"""Function that asks the server at an address for a completion, and returns its text."""


def stream_in_thread(address: str, retry: RetryPolicy) -> str:
    with Client(address, retry=retry) as client:
        return "".join(client.generate("hi").text)


def complete_in_thread(address: str, retry: RetryPolicy) -> str:
    with Client(address, retry=retry) as client:
        return client.complete("hi").text


def stream_in_loop(address: str, retry: RetryPolicy) -> str:
    async def ask() -> str:
        async with AsyncClient(address, retry=retry) as client:
            return "".join([piece async for piece in client.generate("hi").text])

    return asyncio.run(ask())


def complete_in_loop(address: str, retry: RetryPolicy) -> str:
    async def ask() -> str:
        async with AsyncClient(address, retry=retry) as client:
            return (await client.complete("hi")).text

    return asyncio.run(ask())


CALLERS = [stream_in_thread, stream_in_loop, complete_in_thread, complete_in_loop]


def error_of(reason: str) -> TandemError:
    """Return an error as a server raises it; a retry that it advises need not wait."""
    cls = ERROR_BY_REASON[reason]
    advised = None if cls.default_retry_after_s is None else 0.0
    return cls(MESSAGE, field="a.b", retry_after_s=advised, metadata={"key": "value"})


@pytest.mark.parametrize(
    "ask", [complete_in_thread, complete_in_loop], ids=lambda ask: ask.__name__
)
def test_field_of_a_whole_completion_is_that_of_its_stream(server, ask: Ask):
    """
    The path of a wrong field begins at what the caller has set, without the message of Complete
    around it.
    """
    refusal = errors.InvalidParameter(MESSAGE, field="request.stopping.max_tokens")
    server.play(Act(accept=False, error=refusal))
    with pytest.raises(errors.InvalidParameter) as raised:
        ask(server.address, NO_RETRY)
    assert "stopping.max_tokens" == raised.value.field


def test_table_names_every_reason_of_the_contract():
    """
    The tables above have each class of the package, so that a new reason needs a fate here.
    """
    assert {
        name: cls
        for name, cls in ERROR_BY_REASON.items()
        if cls.__module__.startswith("tandem.error")
    } == {name: fate.raised for name, fate in FATES.items()}
    assert {cls.reason: cls for cls in (PeerUnavailable, CallCancelled, DeadlineExceeded)} == {
        name: fate.raised for name, fate in LOCAL.items()
    }


class TestEveryReason:
    @pytest.mark.parametrize("ask", CALLERS, ids=lambda ask: ask.__name__)
    @pytest.mark.parametrize("reason", FATES)
    def test_refusal_is_retried_or_raised_as_its_class(self, server, reason, ask: Ask):
        """
        A refusal that time can mend is tried again until the answer comes; any other raises the
        class of its reason, with the server's words and details, after one call.
        """
        server.play(Act(accept=False, error=error_of(reason)), Act())
        if FATES[reason].is_retried:
            assert ANSWER == ask(server.address, SOON)
        else:
            with pytest.raises(TandemError) as raised:
                ask(server.address, SOON)
            assert FATES[reason].raised is type(raised.value)
            assert (MESSAGE, reason, "a.b") == (
                raised.value.message,
                raised.value.reason,
                raised.value.field,
            )
            assert {"key": "value"} == raised.value.metadata
        assert 1 + FATES[reason].is_retried == len(server.seen.generate + server.seen.complete)

    @pytest.mark.parametrize(
        "ask", [stream_in_thread, stream_in_loop], ids=lambda ask: ask.__name__
    )
    @pytest.mark.parametrize("reason", FATES)
    def test_error_in_mid_stream_is_the_class_of_its_reason(self, server, reason, ask: Ask):
        """
        Each reason that ends an accepted stream raises its own class where nothing is retried.
        """
        server.play(Act(num_tokens=2, error=error_of(reason)))
        with pytest.raises(TandemError) as raised:
            ask(server.address, NO_RETRY)
        assert FATES[reason].raised is type(raised.value)
        assert (MESSAGE, reason) == (raised.value.message, raised.value.reason)
        assert {"key": "value"} == raised.value.metadata

    @pytest.mark.parametrize("reason", FATES)
    def test_command_ends_with_one_sentence_and_the_exit_code(self, server, run, reason):
        """
        `tandem generate` prints one line, which begins with the reason, and ends with its exit code.
        """
        server.play(Act(accept=False, error=error_of(reason)))
        result = run("generate", "hi", "--address", server.address)
        assert f"tandem: {reason}: it was wrong: do better\n" == result.stderr
        assert ("", FATES[reason].exit_code) == (result.stdout, result.exit_code)


class TestLocalReasons:
    @pytest.mark.parametrize("reason", LOCAL)
    def test_failure_without_a_typed_answer_has_its_fate_too(self, reason, capsys):
        """
        A failure that this client names itself is transient or not, and has its exit code and one line.
        """
        error = LOCAL[reason].raised(MESSAGE)

        @readable_errors
        def command() -> None:
            raise error

        with pytest.raises(typer.Exit) as ended:
            command()
        assert LOCAL[reason].is_retried == is_transient(error)
        assert LOCAL[reason].exit_code == ended.value.exit_code
        assert 1 == capsys.readouterr().err.count("\n")


class TestBlame:
    def test_wrong_request_and_broken_executor_never_look_alike(self):
        """
        A mistake of the caller and a fault behind the service share neither the gRPC code nor the
        exit code, and no wrong request is ever tried again.
        """
        wrong = {name for name, fate in FATES.items() if fate.raised.code == "INVALID_ARGUMENT"}
        broken = {
            "NO_EXECUTOR",
            "EXECUTOR_LOADING",
            "EXECUTOR_LOST",
            "CORE_TIMEOUT",
            "SESSION_LOST",
            "CORRUPT_MESSAGE",
            "INVALID_LOGITS",
            "POISON_REQUEST",
            "INTERNAL",
        }
        assert 7 == len(wrong)
        for outcome in (lambda fate: fate.raised.code, lambda fate: fate.exit_code):
            of_wrong, of_broken = (
                {outcome(FATES[name]) for name in names} for names in (wrong, broken)
            )
            assert set() == of_wrong & of_broken
        assert not any(FATES[name].is_retried for name in wrong)
