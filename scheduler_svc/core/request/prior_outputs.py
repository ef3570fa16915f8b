"""
Requests that come with outputs, which a scheduler that is gone had produced for them.

They run as if this core had produced those tokens: the tokens count against max_tokens and the
context, and are computed again like the outputs of a request that was preempted. Only the events
differ: offsets begin after these tokens, and times and token counts are those of new tokens.
"""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.request.new_request import NewRequest
from tandem.errors import InvalidParameter, TotalTooLong
from tandem.link.batch import Int32Column

_FIELD = "resume.choices"


def check_prior_outputs(new: NewRequest) -> None:
    """
    Check that the outputs a request comes with can have been produced for it.

    A choice that ends with the last of its tokens is accepted, and ends at once.

    Raises:
        InvalidParameter: A column or a finished choice belongs to none of its choices, all of its
            choices have ended, or one has more tokens than it may have or ends before its last one.
    """
    if new.prior_outputs and len(new.prior_outputs) != new.num_choices:
        message = (
            f"prior outputs of {len(new.prior_outputs)} choices were given and n is "
            f"{new.num_choices}: give one column, perhaps an empty one, for each choice"
        )
        raise InvalidParameter(message, field=_FIELD)
    if strangers := new.finished_choices.difference(range(new.num_choices)):
        message = f"choice {min(strangers)} is said to be finished and n is {new.num_choices}"
        raise InvalidParameter(message, field=_FIELD)
    if len(new.finished_choices) == new.num_choices:
        message = "all choices are said to be finished: nothing is left to produce"
        raise InvalidParameter(message, field=_FIELD)
    if new.prior_outputs:
        for choice in new.live_choices:
            _check_choice(new, choice, new.prior_outputs[choice])


def check_prior_lengths(new: NewRequest, longest_output: int) -> None:
    """
    Check that the outputs a request comes with fit the context.

    Args:
        new: A request that `check_prior_outputs` let pass.
        longest_output: Most output tokens of each choice.

    Raises:
        TotalTooLong: They do not; that happens where the earlier scheduler had a longer context.
    """
    for choice in new.live_choices if new.prior_outputs else ():
        num_prior = len(new.prior_outputs[choice])
        if num_prior > longest_output:
            message = (
                f"choice {choice} has {num_prior} output tokens already and there is room for "
                f"{longest_output} after its prompt: resume it where the context is as long as it "
                "was"
            )
            raise TotalTooLong(message, field=_FIELD)


def _check_choice(new: NewRequest, choice: int, prior: Int32Column) -> None:
    if len(prior) > new.max_tokens:
        message = (
            f"choice {choice} has {len(prior)} output tokens already and max_tokens is "
            f"{new.max_tokens}: send the request as it was"
        )
        raise InvalidParameter(message, field=_FIELD)
    is_end = np.isin(prior[:-1], list(new.end_ids))
    if is_end.any():
        message = (
            f"token {prior[is_end.argmax()]} at offset {is_end.argmax()} ends choice {choice}, "
            f"which goes on to offset {len(prior) - 1}: send what was received of it"
        )
        raise InvalidParameter(message, field=_FIELD)
