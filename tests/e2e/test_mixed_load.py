"""Many clients that do everything at once: no request disturbs another, and nothing is left."""

from __future__ import annotations

import concurrent.futures
import contextlib
import random
import threading
import time

import pytest

from tandem.error_codes import DeadlineExceeded
from tandem.errors import InvalidParameter, QueueFull, RequestNotFound
from tandem_client import FinishReason

NUM_CLIENTS = 8
NUM_TURNS = 25
"""Minimum number of turns of each client; clients go on until every outcome has happened."""
LONGEST_S = 200.0
"""Seconds after which clients stop even if an outcome is missing."""
PROMPTS = [[10 + number] * (3 + 9 * number) for number in range(6)]
OPTIONS = {"max_tokens": 24, "ignore_eos": True, "seed": 9, "temperature": 0.9}


def complete(client, source, expected):
    """Ask for a whole answer, which must be the one that the request gets alone."""
    number = source.randrange(len(PROMPTS))
    assert expected[number] == client.complete(token_ids=PROMPTS[number], **OPTIONS).token_ids
    return "completed"


def leave(client, source, _expected):
    """Close a stream after a few events, or after all if it has fewer."""
    stream = client.generate(token_ids=source.choice(PROMPTS), **OPTIONS)
    for _ in range(source.randrange(1, 8)):
        next(stream, None)
    stream.close()
    return "left"


def abort(client, source, _expected):
    """Abort an own stream and read it to its end."""
    stream = client.generate(token_ids=source.choice(PROMPTS), max_tokens=300, ignore_eos=True)
    next(stream)
    with contextlib.suppress(RequestNotFound):
        client.abort(stream.started.request_id)
    list(stream)
    return {FinishReason.CANCELLED: "aborted", FinishReason.MAX_TOKENS: "was over"}[
        stream.finished.reason
    ]


def run_out_of_time(client, source, _expected):
    """Let the call's deadline pass in the middle of the output."""
    asked = {"max_tokens": 400, "ignore_eos": True, "deadline_s": source.uniform(0.01, 0.1)}
    try:
        client.complete(token_ids=source.choice(PROMPTS), **asked)
    except DeadlineExceeded:
        return "timed out"
    return "was over"


def err(client, _source, _expected):
    """Send a request that must be refused."""
    with pytest.raises(InvalidParameter):
        client.complete("x", temperature=9.0)
    return "refused"


ALL_OUTCOMES = {"completed", "left", "aborted", "timed out", "refused", "queue full"}
TURNS = (complete, complete, leave, abort, run_out_of_time, err)


class TestMixedLoad:
    @pytest.mark.slow
    def test_only_what_was_asked_happens_and_nothing_is_left(self, small, idle):
        """
        Answers are the same as alone amid aborts, deadlines, closed streams, refusals and a full
        queue; afterwards every accepted request has ended once and no block is held.
        """
        before = idle(small)
        with small.client() as client:
            expected = [
                client.complete(token_ids=prompt, **OPTIONS).token_ids for prompt in PROMPTS
            ]

            happened = set()
            num_out_of_time = 0
            lock = threading.Lock()
            end_s = time.monotonic() + LONGEST_S

            def live(seed):
                nonlocal num_out_of_time
                source = random.Random(seed)
                num_turns = 0
                while num_turns < NUM_TURNS or (
                    not happened >= ALL_OUTCOMES and time.monotonic() < end_s
                ):
                    num_turns += 1
                    turn = source.choice(TURNS)
                    with lock:
                        num_out_of_time += turn is run_out_of_time
                    try:
                        happened.add(turn(client, source, expected))
                    except QueueFull:
                        happened.add("queue full")

            with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as threads:
                list(threads.map(live, range(NUM_CLIENTS)))
        after = idle(small)

        assert happened >= ALL_OUTCOMES
        accepted, finished, failed = (
            getattr(after, name) - getattr(before, name)
            for name in ("accepted_requests", "finished_requests", "failed_requests")
        )
        assert accepted == finished + failed
        # None but a call whose deadline passed before its turn came ends by an error.
        assert failed <= num_out_of_time
