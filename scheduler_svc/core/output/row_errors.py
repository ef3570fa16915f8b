"""Row errors of a step: the request computes its KV again, or fails, and no other does."""

from __future__ import annotations

from scheduler_svc.core.faults.distrust import distrust, retry_alone
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.state.ends import fail
from scheduler_svc.core.state.replica import Replica
from tandem.errors import InvalidLogits, InvalidParameter, TandemError
from tandem.link.results import RowError, RowErrorKind


def fail_row(replica: Replica, error: RowError) -> None:
    """
    Fail the request of a row with an error; where NaN may come of KV that it shared, have it
    compute everything itself first.
    """
    request = replica.request_at(error.slot, error.generation)
    if request is None:
        return
    if request.prefix.writers and error.kind is RowErrorKind.INVALID_LOGITS:
        retry_alone(replica, request)
    else:
        distrust(replica, request)
        fail(replica.cell, request, _row_error(request, error))


def _row_error(request: Request, error: RowError) -> TandemError:
    request_id = request.new.request_id
    if error.kind is RowErrorKind.TOKEN_OUT_OF_RANGE:
        message = (
            f"a token of request {request_id} is outside the model's vocabulary ({error.message}): "
            "tokenize with this model's tokenizer"
        )
        return InvalidParameter(message, field="prompt")
    message = (
        f"the model produced NaN or infinity for request {request_id} ({error.message}): try "
        "another prompt, and check the model's weights if others fail too"
    )
    return InvalidLogits(message)
