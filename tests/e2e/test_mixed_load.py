"""Many clients that do everything at once: whatever happens to one touches no other, and nothing is left."""

from __future__ import annotations

import concurrent.futures
import contextlib
import random

import pytest

from tandem.errors import InvalidParameter, QueueFull, RequestNotFound
from tandem.status import CallCancelled
from tandem_client import FinishReason

NUM_CLIENTS = 8
NUM_TURNS = 25
PROMPTS = [[10 + number] * (3 + 9 * number) for number in range(6)]
OPTIONS = {"max_tokens": 24, "ignore_eos": True, "seed": 9, "temperature": 0.9}


def complete(client, source, expected):
    """One whole answer, which must be what it is alone."""
    number = source.randrange(len(PROMPTS))
    assert expected[number] == client.complete(token_ids=PROMPTS[number], **OPTIONS).token_ids
    return "completed"


def leave(client, source, _expected):
    """Close a stream after a few events."""
    stream = client.generate(token_ids=source.choice(PROMPTS), **OPTIONS)
    for _ in range(source.randrange(1, 8)):
        next(stream)
    stream.close()
    return "left"


def abort(client, source, _expected):
    """Abort an own stream and read it to its end."""
    stream = client.generate(token_ids=source.choice(PROMPTS), max_tokens=300, ignore_eos=True)
    next(stream)
    with contextlib.suppress(RequestNotFound):
        client.abort(stream.started.request_id)
    list(stream)
    assert FinishReason.CANCELLED == stream.finished.reason
    return "aborted"


def run_out_of_time(client, source, _expected):
    """Let the call's deadline pass in the middle."""
    with pytest.raises(CallCancelled):
        client.complete(
            token_ids=source.choice(PROMPTS), max_tokens=400, ignore_eos=True, deadline_s=0.05
        )
    return "timed out"


def err(client, _source, _expected):
    """Ask for something impossible."""
    with pytest.raises(InvalidParameter):
        client.complete("x", temperature=9.0)
    return "refused"


TURNS = (complete, complete, leave, abort, run_out_of_time, err)


class TestMixedLoad:
    @pytest.mark.slow
    def test_only_what_was_asked_happens_and_nothing_is_left(self, small, idle):
        """
        Answers stay what they are alone amid aborts, deadlines, closed streams, refusals and a full queue;
        afterwards every accepted request has ended once and no block is held.
        """
        before = idle(small)
        with small.client() as client:
            expected = [
                client.complete(token_ids=prompt, **OPTIONS).token_ids for prompt in PROMPTS
            ]

            def live(seed):
                source = random.Random(seed)
                outcomes = []
                for _ in range(NUM_TURNS):
                    try:
                        outcomes.append(source.choice(TURNS)(client, source, expected))
                    except QueueFull:
                        outcomes.append("queue full")
                return outcomes

            with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as threads:
                lives = list(threads.map(live, range(NUM_CLIENTS)))
        after = idle(small)

        happened = {outcome for life in lives for outcome in life}
        assert {"completed", "left", "aborted", "timed out", "refused", "queue full"} == happened
        accepted = after.accepted_requests - before.accepted_requests
        assert accepted == after.finished_requests - before.finished_requests
        assert 0 == after.failed_requests - before.failed_requests
