"""The engine's errors against the table of tandem.errors."""

from __future__ import annotations

import pytest

from tandem.errors import ERROR_BY_REASON
from tandem_embedded.errors import (
    ConfigError,
    EngineError,
    EngineMemoryError,
    ExecutionError,
    SchedulerError,
    ValidationError,
    engine_error,
    engine_errors,
)

KIND_OF = {
    "INVALID_CONFIG": ConfigError,
    "INVALID_MODEL": ConfigError,
    "INCOMPATIBLE_EXECUTOR": ConfigError,
    "OUT_OF_MEMORY": EngineMemoryError,
    "MEMORY_PRESSURE": EngineMemoryError,
    "INVALID_PARAMETER": ValidationError,
    "EMPTY_PROMPT": ValidationError,
    "PROMPT_TOO_LONG": ValidationError,
    "TOTAL_TOO_LONG": ValidationError,
    "NEVER_FITS": ValidationError,
    "CHAT_TEMPLATE": ValidationError,
    "FEATURE_UNSUPPORTED": ValidationError,
    "MODEL_NOT_FOUND": ValidationError,
    "QUEUE_FULL": SchedulerError,
    "REQUEST_NOT_FOUND": SchedulerError,
    "DUPLICATE_REQUEST_ID": SchedulerError,
    "EVENTS_NOT_TRACKED": SchedulerError,
    "ADDRESS_IN_USE": ExecutionError,
    "CORE_TIMEOUT": ExecutionError,
    "CORRUPT_MESSAGE": ExecutionError,
    "DRAINING": ExecutionError,
    "EXECUTOR_LOADING": ExecutionError,
    "EXECUTOR_LOST": ExecutionError,
    "HANDED_OVER": ExecutionError,
    "INTERNAL": ExecutionError,
    "INVALID_LOGITS": ExecutionError,
    "MODEL_CHANGED": ExecutionError,
    "NO_EXECUTOR": ExecutionError,
    "PERMISSION_DENIED": ExecutionError,
    "POISON_REQUEST": ExecutionError,
    "PROFILE_RUNNING": ExecutionError,
    "PROFILE_UNSUPPORTED": ExecutionError,
    "RESPONSE_TOO_LARGE": ExecutionError,
    "SESSION_HELD": ExecutionError,
    "SESSION_LOST": ExecutionError,
    "SLOW_CONSUMER": ExecutionError,
    "STREAM_REPLACED": ExecutionError,
    "UNAUTHENTICATED": ExecutionError,
}


def test_every_reason_has_a_kind_here():
    """
    The table above names each reason of a TandemError, so a new reason needs a kind.
    """
    declared = {
        name
        for name, error in ERROR_BY_REASON.items()
        if error.__module__.startswith("tandem.error")
    }
    assert declared == set(KIND_OF)


@pytest.mark.parametrize("reason", KIND_OF)
def test_reason_gives_its_kind_and_keeps_what_the_error_says(reason):
    """
    An error is converted to its kind; reason, message, field, advice and metadata stay.
    """
    error = ERROR_BY_REASON[reason](
        "it failed.", field="sampling.top_p", retry_after_s=2.5, metadata={"limit": "max_num_seqs"}
    )
    converted = engine_error(error)
    assert type(converted) is KIND_OF[reason]
    assert f"{KIND_OF[reason].prefix}: it failed." == str(converted)
    assert ("it failed.", reason) == (converted.message, converted.reason)
    assert ("sampling.top_p", 2.5) == (converted.field, converted.retry_after_s)
    assert {"limit": "max_num_seqs"} == converted.metadata


def test_metadata_is_the_errors_own():
    """
    A change of the converted error's metadata reaches no other error; without any it is empty.
    """
    error = ERROR_BY_REASON["QUEUE_FULL"]("full", metadata={"limit": "max_num_seqs"})
    engine_error(error).metadata.clear()
    assert {"limit": "max_num_seqs"} == error.metadata
    assert {} == EngineError("it failed.").metadata


def test_block_converts_what_is_raised_in_it():
    """
    `engine_errors` raises the converted error, with the original as its cause.
    """
    error = ERROR_BY_REASON["QUEUE_FULL"]("full", metadata={"limit": "max_num_seqs"})
    with pytest.raises(SchedulerError) as caught, engine_errors():
        raise error
    assert error is caught.value.__cause__
    assert {"limit": "max_num_seqs"} == caught.value.metadata
