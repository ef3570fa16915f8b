"""Services with several fake executors, and requests that run on all of them."""

from __future__ import annotations

from tandem.errors import SessionLost
from tandem.link.session import LossCause
from tests.scheduler_svc.service.fakes.arithmetic_runner import expected_outputs

ADDRESSES = ("one:1", "two:1", "three:1")
NUM_TOKENS = 40


def submit(frontend, num_requests: int, *, num_tokens: int = NUM_TOKENS, first: int = 0) -> None:
    for stream_id in range(first, first + num_requests):
        frontend.submit(stream_id, [5, 6, 7 + stream_id], num_tokens)


def assert_all_right(bench, frontend, num_requests: int, num_tokens: int = NUM_TOKENS) -> None:
    """Wait until so many requests have ended, each with all of its tokens."""
    bench.until(lambda: len(frontend.ended) + len(frontend.failed) == num_requests, turn_s=0.01)
    assert {} == frontend.failed
    for stream_id in range(num_requests):
        expected = expected_outputs([5, 6, 7 + stream_id], num_tokens)
        assert expected == frontend.tokens[stream_id], stream_id


def running(bench) -> list[int]:
    """Return how many requests each executor runs."""
    return [0 if one.port is None else one.port.num_running for one in bench.loop._members]


def hold(bench, *, is_holding: bool = True) -> None:
    """Let executors compute nothing, or all that they got."""
    for link in bench.links.values():
        link.is_holding = is_holding
        if not is_holding and link.is_up:
            link.compute()


def start_on_all(bench, frontend, num_requests: int = 4, **given) -> None:
    """Submit requests and wait until every executor runs some of them."""
    hold(bench)
    submit(frontend, num_requests, **given)
    bench.until(lambda: all(running(bench)), turn_s=0.01)


def end_process(link) -> None:
    """End an executor's process, so that the scheduler learns of it at once."""
    link.is_up = False
    link.cut(SessionLost("gone", metadata=LossCause.NEW_BOOT.as_metadata()))


def member(bench, address: str):
    """Return what the service has of an executor."""
    return bench.loop._members.find(address)
