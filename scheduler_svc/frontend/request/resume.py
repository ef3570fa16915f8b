"""
Streams that are resumed after a break: the output that the client holds is checked, and the new
stream goes on after it. The service keeps no state of the stream that broke.

Field paths start at GenerateRequest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.frontend.request.validation import CheckedParams, check_token_ids
from scheduler_svc.frontend.text.output import (
    NOTHING_BEFORE,
    ChoiceStart,
    OutputText,
    Prior,
    PriorEnd,
)
from tandem.errors import InvalidParameter
from tandem.inference.v1 import resume_pb2
from tandem.inference.v1.inference_service_pb2 import GenerateRequest


def check_resume(
    request: GenerateRequest, params: CheckedParams, *, vocab_size: int, max_tokens: int
) -> list[Prior]:
    """
    Check the `resume` of a request that has one, and return the output of each choice that the
    client holds, in order.

    Raises:
        InvalidParameter: The stream cannot be resumed; the error has the path of the field.
    """
    priors = [NOTHING_BEFORE] * params.num_choices
    if params.sampling.temperature > 0 and not request.sampling.HasField("seed"):
        raise InvalidParameter(
            "resume needs the seed that the stream ran with: send Started.sampling as it came.",
            field="sampling.seed",
        )
    for at, one in enumerate(request.resume.choices):
        path = f"resume.choices[{at}]"
        if one.choice >= params.num_choices:
            raise InvalidParameter(
                f"choice must be less than n, which is {params.num_choices}, got {one.choice}.",
                field=f"{path}.choice",
            )
        if priors[one.choice] is not NOTHING_BEFORE:
            raise InvalidParameter(f"choice {one.choice} is listed twice.", field=f"{path}.choice")
        priors[one.choice] = _check_one(one, params, path, vocab_size, max_tokens)
    return priors


def start_choices(
    priors: Sequence[Prior],
    make_output: Callable[[], OutputText],
    params: CheckedParams,
    *,
    max_tokens: int,
    fills_context: bool,
) -> list[ChoiceStart]:
    """
    Make the output processing of each choice and feed it the ids that the client holds. This costs
    about a microsecond per id.

    Raises:
        InvalidParameter: More ids follow a stop string in the text.
    """
    starts = []
    for prior in priors:
        start = ChoiceStart(output=make_output(), prior=prior)
        if prior.is_finished:
            start.output.num_tokens = len(prior.token_ids)
        elif len(prior.token_ids):
            start.output.go_on_after(prior.token_ids.tolist())
            start.end = _end_of(start, params, max_tokens, fills_context=fills_context)
        starts.append(start)
    return starts


def _check_one(
    one: resume_pb2.PriorOutput,
    params: CheckedParams,
    path: str,
    vocab_size: int,
    max_tokens: int,
) -> Prior:
    ids = one.token_ids
    if len(ids) > max_tokens:
        raise InvalidParameter(
            f"a choice can have at most max_tokens ids, which is {max_tokens}, got {len(ids)}.",
            field=f"{path}.token_ids",
        )
    check_token_ids(ids, vocab_size, field=f"{path}.token_ids")
    column = np.fromiter(ids, np.int32, len(ids))
    ending = np.isin(column[:-1], (*params.eos_token_ids, *params.stop_token_ids)).nonzero()[0]
    if len(ending):
        at = int(ending[0])
        raise InvalidParameter(
            f"token id {column[at]} ends the choice, but more ids follow it.",
            field=f"{path}.token_ids[{at}]",
        )
    return Prior(token_ids=column, is_finished=one.finished, path=path)


def _end_of(
    start: ChoiceStart, params: CheckedParams, max_tokens: int, *, fills_context: bool
) -> PriorEnd | None:
    """Return the end of a choice at the last id that its client holds; None if it goes on."""
    output, ids = start.output, start.prior.token_ids
    last = int(ids[-1])
    is_full = len(ids) == max_tokens
    if output.stopped is None and is_full:
        output.finish()  # The held text was sent with the ids, but may complete a stop string.
    if output.stopped is not None:
        if output.num_tokens < len(ids):
            raise InvalidParameter(
                f"the text has the stop string {output.stopped.stop!r}, but more ids follow it.",
                field=f"{start.prior.path}.token_ids[{output.num_tokens}]",
            )
        return PriorEnd(reason=FinishReason.STOP_STRING)
    if last in params.eos_token_ids:
        return PriorEnd(reason=FinishReason.EOS, matched_token=last)
    if last in params.stop_token_ids:
        return PriorEnd(reason=FinishReason.STOP_TOKEN, matched_token=last)
    if is_full:
        reason = FinishReason.CONTEXT_LIMIT if fills_context else FinishReason.MAX_TOKENS
        return PriorEnd(reason=reason)
    return None
