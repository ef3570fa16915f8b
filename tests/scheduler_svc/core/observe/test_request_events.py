"""Events of one request and the list of requests, for operators."""

from __future__ import annotations

from collections import Counter

import pytest

from scheduler_svc.core.kv_cache.block_pool import BlockPool
from scheduler_svc.core.observe import request_events
from scheduler_svc.core.observe.request_events import LEGAL_ORDER, EventKind, EventRecorder, Phase
from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.request.request import FinishReason, Request, RequestState
from scheduler_svc.core.request.request_parts import Terms
from tandem.errors import EventsNotTracked, InternalError, InvalidLogits, RequestNotFound
from tests.scheduler_svc.core.harness import GREEDY, Rig, small_config

ALL = CoreOptions(track_request_events=True, track_token_events=True, track_paused_events=True)
PLAIN = CoreOptions(track_request_events=True, schedule_conservativeness=0.0)
ADD, SCHEDULED, TOKEN, PAUSE, EVICT, RETRACT, FINISH, FAIL, *_ = EventKind


def kinds(rig: Rig, request_id: str) -> list[EventKind]:
    return [event.kind for event in rig.core.request_events(request_id)]


def tight(options: CoreOptions, delay: int = 1) -> Rig:
    """Return a rig with two requests that together outgrow a pool either of them fits in."""
    rig = Rig(small_config(max_num_blocks=8, max_model_len=32), delay=delay, options=options)
    rig.submit(prompt_len=8, max_tokens=20)
    rig.submit(prompt_len=8, max_tokens=20)
    return rig


def make_request(number: int = 0, request_id: str = "r") -> Request:
    rig = Rig()
    rig.submit()
    new = rig.submitted[0]
    fields = {name: getattr(new, name) for name in NewRequest.__dataclass_fields__}
    new = NewRequest(**(fields | {"request_id": request_id}))
    return Request(new=new, number=number, terms=Terms(stop_len=13))


class TestLife:
    def test_a_plain_life_is_add_scheduled_tokens_finish(self):
        """
        A request that is never preempted arrives, is scheduled once, produces and finishes.
        """
        rig = Rig(options=ALL)
        rig.submit(max_tokens=3)
        rig.run()
        assert [ADD, SCHEDULED, TOKEN, TOKEN, TOKEN, FINISH] == kinds(rig, "r0")

    def test_every_token_has_an_event_with_its_id(self):
        """
        Each output token has an event, in order and with the token's id, under track_token_events.
        """
        rig = tight(ALL, delay=2)
        rig.run()
        for handle in (0, 1):
            events = rig.core.request_events(f"r{handle}")
            assert rig.outputs[handle] == [e.token_id for e in events if e.kind is TOKEN]

    def test_token_events_say_how_full_the_pool_was(self):
        """
        The block counts of a token event add up to the pool and count the request's own blocks.
        """
        rig = Rig(options=ALL)
        rig.submit(prompt_len=9, max_tokens=2)
        rig.run()
        for event in rig.core.request_events("r0"):
            if event.kind is TOKEN:
                blocks = event.blocks
                assert 32 == blocks.used + blocks.cached + blocks.free
                assert 3 == blocks.used

    def test_time_never_goes_back(self):
        """
        Events of a request come in the order of their times, the first at its arrival.
        """
        rig = tight(ALL, delay=4)
        rig.run()
        for handle in (0, 1):
            times = [event.time_s for event in rig.core.request_events(f"r{handle}")]
            assert times == sorted(times)
            assert rig.submitted[handle].arrival_s == times[0]

    @pytest.mark.parametrize("options", [ALL, PLAIN], ids=["with-tokens", "without"])
    def test_the_end_says_the_time_to_the_first_token(self, options):
        """
        The time to the first token is known at the end, also where tokens have no events.
        """
        rig = Rig(options=options)
        rig.now = 5.0
        rig.submit(prompt_len=40, max_tokens=4)
        rig.run()
        end = rig.core.request_events("r0")[-1]
        assert rig.ended[0].first_token_s == end.ttft_s
        assert 3.0 == end.ttft_s

    def test_without_token_events_there_are_none(self):
        """
        Tokens have no events where only request events are tracked.
        """
        rig = Rig(options=PLAIN)
        rig.submit(max_tokens=3)
        rig.run()
        assert [ADD, SCHEDULED, FINISH] == kinds(rig, "r0")

    @pytest.mark.parametrize("delay", [1, 2, 4])
    def test_a_preempted_request_is_retracted_and_scheduled_again(self, delay):
        """
        Each preemption is one RETRACT, followed by one more SCHEDULED.
        """
        rig = tight(PLAIN, delay)
        rig.run()
        counts = Counter(kinds(rig, "r0") + kinds(rig, "r1"))
        assert rig.core.stats().preemptions == counts[RETRACT] >= 1
        assert 2 + counts[RETRACT] == counts[SCHEDULED]

    def test_a_lost_executor_retracts_who_ran(self):
        """
        A request that ran when the executor was lost is retracted for that reason; one that waited
        is not.
        """
        rig = Rig(small_config(max_batch_size=1), options=PLAIN)
        rig.submit()
        rig.submit()
        rig.step()
        rig.lose_executor()
        events = rig.core.request_events("r0")
        assert [ADD, SCHEDULED, RETRACT] == [event.kind for event in events]
        assert "executor lost" == events[-1].detail
        assert [ADD] == kinds(rig, "r1")

    @pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.STOP_STRING])
    def test_the_end_says_why(self, reason):
        """
        FINISH names its reason, and a request that never ran has no first token.
        """
        rig = Rig(options=ALL)
        rig.submit()
        rig.now = 2.0
        rig.core.end_request("r0", reason, rig.now)
        end = rig.core.request_events("r0")[-1]
        assert (FINISH, 2.0, reason.name, None) == (end.kind, end.time_s, end.detail, end.ttft_s)

    def test_a_failure_names_its_reason(self):
        """
        FAIL carries the reason of the error table and the time it was seen.
        """
        rig = Rig(options=ALL)
        rig.submit()
        rig.step()
        rig.now = 7.0
        rig.core.fail_all(InvalidLogits("NaN"), rig.now)
        end = rig.core.request_events("r0")[-1]
        assert (FAIL, "INVALID_LOGITS", 7.0) == (end.kind, end.detail, end.time_s)

    def test_a_refused_request_leaves_no_event(self):
        """
        A refused request has no events.
        """
        rig = Rig(options=ALL)
        with pytest.raises(Exception, match="max_model_len"):
            rig.submit(prompt_len=1000)
        with pytest.raises(RequestNotFound, match="r0"):
            rig.core.request_events("r0")


class TestSwitch:
    def test_by_default_nothing_is_kept(self):
        """
        A core without any of the options has no recorder, and asking it says which option to set.
        """
        rig = Rig()
        rig.submit()
        with pytest.raises(EventsNotTracked, match="track_request_events"):
            rig.core.request_events("r0")

    @pytest.mark.parametrize(
        "name", ["track_request_events", "track_token_events", "track_paused_events"]
    )
    def test_any_option_turns_request_events_on(self, name):
        """
        Token and pause events come on top of request events, so either asks for those too.
        """
        rig = Rig(options=CoreOptions(**{name: True}))
        rig.submit(max_tokens=1)
        rig.run()
        assert [ADD, SCHEDULED, FINISH] == [kind for kind in kinds(rig, "r0") if kind is not TOKEN]

    @pytest.mark.parametrize(("options", "count"), [(ALL, 1), (PLAIN, 0)])
    def test_pauses_are_kept_where_asked_for(self, options, count):
        """
        A pause has an event only under track_paused_events.
        """
        recorder = EventRecorder(options)
        request = make_request()
        recorder.note(ADD, request, 0.0)
        recorder.note(SCHEDULED, request, 1.0)
        recorder.note_pause(request, 2.0)
        assert count == len(recorder.events_of("r")) - 2


class TestBounds:
    def test_the_middle_of_a_long_life_is_left_out(self, monkeypatch):
        """
        The first and the last of too many events are kept, with the number left out between them.
        """
        monkeypatch.setattr(request_events, "MAX_EVENTS_PER_CHOICE", 8)
        rig = Rig(options=ALL)
        rig.submit(max_tokens=20)
        rig.run()
        events = rig.core.request_events("r0")
        assert 8 == len(events)
        assert [0, 0, 0, 0, 23 - 8, 0, 0, 0] == [event.num_dropped for event in events]
        assert [ADD, SCHEDULED, TOKEN, TOKEN] == [event.kind for event in events[:4]]
        assert rig.outputs[0][-3:] == [event.token_id for event in events[4:7]]
        assert FINISH is events[-1].kind

    def test_the_oldest_ended_requests_are_forgotten(self, monkeypatch):
        """
        Events of ended requests are kept up to a total; the latest one's always are.
        """
        monkeypatch.setattr(request_events, "MAX_ENDED_EVENTS", 9)
        rig = Rig(options=PLAIN)
        for _ in range(4):
            rig.submit()
            rig.run()
        assert [3, 3, 3] == [len(kinds(rig, f"r{i}")) for i in (1, 2, 3)]
        with pytest.raises(RequestNotFound):
            rig.core.request_events("r0")
        monkeypatch.setattr(request_events, "MAX_ENDED_EVENTS", 1)
        rig.submit()
        rig.run()
        assert [ADD, SCHEDULED, FINISH] == kinds(rig, "r4")

    def test_a_reused_id_means_the_latest_request(self):
        """
        An id that was used again has the events of its latest use.
        """
        rig = Rig(options=PLAIN)
        rig.submit(request_id="same")
        rig.run()
        rig.submit(request_id="same")
        assert [ADD] == kinds(rig, "same")

    def test_a_live_request_is_never_forgotten(self, monkeypatch):
        """
        Ended requests do not push out the events of live ones.
        """
        monkeypatch.setattr(request_events, "MAX_ENDED_EVENTS", 1)
        rig = Rig(options=PLAIN)
        rig.submit(max_tokens=20)
        for _ in range(3):
            rig.submit(max_tokens=1)
        for _ in range(4):
            rig.step()
        assert [ADD, SCHEDULED] == kinds(rig, "r0")


class TestOrder:
    @pytest.mark.parametrize("phase", list(Phase), ids=lambda phase: phase.value)
    @pytest.mark.parametrize("kind", list(EventKind), ids=lambda kind: kind.name)
    def test_only_legal_orders_pass(self, phase, kind):
        """
        An event that the table does not allow after those before it fails the integrity check.
        """
        before = {
            Phase.NEW: [],
            Phase.WAITING: [ADD],
            Phase.RUNNING: [ADD, SCHEDULED],
            Phase.RETRACTED: [ADD, SCHEDULED, RETRACT],
        }
        if phase is Phase.ENDED:
            assert not LEGAL_ORDER[phase]
            return
        recorder, request = EventRecorder(ALL), make_request()
        for earlier in before[phase]:
            recorder.note(earlier, request, 0.0)
        if kind is TOKEN:
            recorder.note_tokens([(request, 1)], BlockPool(4), 0.0)
        else:
            recorder.note(kind, request, 0.0)
        after = LEGAL_ORDER[phase].get(kind)
        request.state = {
            Phase.RUNNING: RequestState.DECODE, Phase.RETRACTED: RequestState.DRAINING,
        }.get(after, RequestState.WAITING)  # fmt: skip
        live = [] if kind in {FINISH, FAIL} else [(request, int(kind is TOKEN))]
        if after is None:
            with pytest.raises(InternalError, match="illegal order"):
                recorder.check_integrity(live)
        else:
            recorder.check_integrity(live)

    def test_the_first_illegal_event_is_the_one_reported(self):
        """
        Later events do not hide where the order broke.
        """
        recorder, request = EventRecorder(ALL), make_request()
        recorder.note(ADD, request, 0.0)
        recorder.note(RETRACT, request, 0.0)
        recorder.note(PAUSE, request, 0.0)
        with pytest.raises(InternalError, match="r is waiting and got RETRACT"):
            recorder.check_integrity([(request, 0)])

    @pytest.mark.parametrize(
        ("state", "num_outputs", "text"),
        [
            (RequestState.DECODE, 0, "is decode, by its events it is waiting"),
            (RequestState.DRAINING, 0, "is draining, by its events it is waiting"),
            (RequestState.WAITING, 1, "1 tokens and 0 events"),
        ],
    )
    def test_events_agree_with_the_state(self, state, num_outputs, text):
        """
        Events that say something else than the request's state or outputs are an inconsistency.
        """
        recorder, request = EventRecorder(ALL), make_request()
        recorder.note(ADD, request, 0.0)
        request.state = state
        with pytest.raises(InternalError, match=text):
            recorder.check_integrity([(request, num_outputs)])

    def test_a_request_without_events_is_an_inconsistency(self):
        """
        Every live request has events, and no other request has any as a live one.
        """
        recorder, request = EventRecorder(ALL), make_request()
        with pytest.raises(InternalError, match="not those in the system"):
            recorder.check_integrity([(request, 0)])
        recorder.note(ADD, request, 0.0)
        with pytest.raises(InternalError, match="not those in the system"):
            recorder.check_integrity([])


class TestListing:
    def test_a_row_says_where_a_request_is(self):
        """
        Each live request has a row, in order of arrival, with its counts as they are now.
        """
        rig = Rig(small_config(max_batch_size=1))
        rig.now = 0.25
        rig.submit(prompt_len=6, max_tokens=8, tenant="blue", priority=-2)
        rig.now = 0.5
        rig.submit(prompt_len=4)
        for _ in range(3):
            rig.step()
        first, second = rig.core.list_requests()
        assert ("r0", 0, 0, RequestState.DECODE, "blue", -2) == (
            first.request_id, first.handle, first.choice, first.state, first.tenant, first.priority,
        )  # fmt: skip
        assert (6, 3, 0.25, 1.25, 0) == (
            first.num_prompt_tokens, first.num_output_tokens, first.arrival_s, first.ttft_s,
            first.num_preemptions,
        )  # fmt: skip
        assert (RequestState.WAITING, 0, 0.5, None) == (
            second.state, second.num_output_tokens, second.arrival_s, second.ttft_s,
        )  # fmt: skip

    def test_outputs_of_a_preempted_request_are_counted(self):
        """
        A row counts outputs wherever the request is, and how often it was preempted.
        """
        rig = Rig()
        rig.submit()
        for _ in range(3):
            rig.step()
        rig.core.preempt("r0")
        row = rig.core.list_requests()[0]
        assert (3, 1) == (row.num_output_tokens, row.num_preemptions)

    def test_ended_requests_have_no_row(self):
        """
        Only live requests are listed.
        """
        rig = Rig()
        rig.submit(sampling=GREEDY)
        rig.run()
        assert [] == rig.core.list_requests()
