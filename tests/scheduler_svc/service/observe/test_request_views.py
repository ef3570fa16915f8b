"""Requests and their events in the form in which operators get them."""

from scheduler_svc.core.listing import RequestRow
from scheduler_svc.core.observe.request_events import BlockStats, EventKind, RequestEvent
from scheduler_svc.core.request.request import RequestState
from scheduler_svc.ipc.snapshot import BlockCounts, ListArgument
from scheduler_svc.service.observe.request_views import event_list, request_list


def row(number: int, **changes: object) -> RequestRow:
    values: dict[str, object] = {
        "request_id": f"request-{number}",
        "handle": number,
        "choice": 0,
        "state": RequestState.DECODE,
        "tenant": "",
        "priority": 0,
        "num_prompt_tokens": 20,
        "num_cached_tokens": 16,
        "num_output_tokens": 3,
        "arrival_s": float(number),
        "ttft_s": 0.5,
        "num_preemptions": 1,
        "number": number,
    }
    return RequestRow(**(values | changes))


ROWS = [
    row(1, tenant="alice"),
    row(2, state=RequestState.WAITING, ttft_s=None),
    row(3, state=RequestState.PAUSED, tenant="alice"),
    row(4),
]


def listed(**wanted: object) -> tuple[list[str], int]:
    found = request_list(ROWS, ListArgument(**({"page_size": 10} | wanted)), 10.0)
    return [one.request_id for one in found.requests], found.total


class TestRequestList:
    def test_everything_is_told(self):
        """Each entry has the core's values, with its age counted from its arrival."""
        found = request_list(ROWS, ListArgument(page_size=1), 10.0)
        (first,) = found.requests
        assert ("request-1", "decode", "alice", 20, 16, 3, 9.0, 1, 0.5) == (
            first.request_id,
            first.state,
            first.tenant,
            first.prompt_tokens,
            first.cached_tokens,
            first.output_tokens,
            first.age_s,
            first.preemptions,
            first.time_to_first_token_s,
        )
        assert 4 == found.total

    def test_tenant_and_state_choose(self):
        """
        A filter by tenant or states lists matching requests; the empty tenant matches those without
        one.
        """
        assert (["request-1", "request-3"], 2) == listed(tenant="alice")
        assert (["request-2", "request-4"], 2) == listed(tenant="")
        assert (["request-3"], 1) == listed(states=("paused",))
        assert (["request-1", "request-4"], 2) == listed(states=("decode",))
        assert (["request-1"], 2) == listed(tenant="alice", page_size=1)

    def test_pages_follow_each_other(self):
        """
        A page goes on after the last request of the one before, and the last page says so; one
        that ended in between is not missed.
        """
        first = request_list(ROWS, ListArgument(page_size=2, tenant=None), 10.0)
        assert (["request-1", "request-2"], 2) == (
            [one.request_id for one in first.requests],
            first.last,
        )
        left = [one for one in ROWS if one.number != 2]
        second = request_list(left, ListArgument(page_size=2, after=2), 10.0)
        assert (["request-3", "request-4"], None, 3) == (
            [one.request_id for one in second.requests],
            second.last,
            second.total,
        )


class TestEventList:
    def test_times_count_from_arrival(self):
        """Events carry everything that was kept, with times in seconds since the first of them."""
        blocks = BlockStats(used=1, cached=2, free=3)
        events = [
            RequestEvent(kind=EventKind.ADD, time_s=100.0, choice=0),
            RequestEvent(
                kind=EventKind.GENERATED_TOKEN, time_s=100.5, choice=1, token_id=7, blocks=blocks
            ),
            RequestEvent(
                kind=EventKind.FINISH,
                time_s=101.0,
                choice=1,
                detail="EOS",
                ttft_s=0.5,
                num_dropped=4,
            ),
        ]
        add, token, finish = event_list(events).events
        assert (1, 0.0, None, None) == (add.kind, add.at_s, add.token_id, add.blocks)
        counts = BlockCounts(used_blocks=1, cached_blocks=2, free_blocks=3)
        assert (3, 0.5, 1, 7, counts) == (
            token.kind, token.at_s, token.choice, token.token_id, token.blocks,
        )  # fmt: skip
        assert (7, 1.0, "EOS", 0.5, 4) == (
            finish.kind, finish.at_s, finish.detail, finish.time_to_first_token_s,
            finish.dropped_events,
        )  # fmt: skip

    def test_no_events_are_an_empty_list(self):
        """A request without events that were kept has an empty list."""
        assert () == event_list([]).events
