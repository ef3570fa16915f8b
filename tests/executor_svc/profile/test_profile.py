"""Traces of an executor's steps, on request."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from contextlib import nullcontext

import grpc
import pytest

from executor_svc.profile import profiles, trace_file
from executor_svc.profile.profiles import Profiles
from executor_svc.profile.step_profile import StepProfile
from tandem.common.v1.profile_pb2 import ProfileOptions as OptionsMessage
from tandem.common.v1.profile_pb2 import TraceChunk
from tandem.errors import Draining, InternalError, InvalidParameter, ProfileRunning
from tandem.executor.v1 import executor_service_pb2 as executor_pb2
from tandem.profile import FEATURE, ProfileOptions
from tests.executor_svc.server.harness import DEADLINE_S, StepClient, refusal, wait_until


def request(**options: object) -> executor_pb2.ProfileRequest:
    return executor_pb2.ProfileRequest(options=OptionsMessage(**options))


def trace_of(messages) -> dict:
    """Return the trace in a call's messages, after comparing its checksum."""
    parts = [message.trace for message in messages if message.HasField("trace")]
    content = b"".join(part.chunk for part in parts)
    assert hashlib.sha256(content).hexdigest() == parts[-1].sha256
    return json.loads(gzip.decompress(content))


def spans(trace, prefix="tandem."):
    """Return the names of our spans in a trace, with the number of each."""
    names = [event.get("name", "") for event in trace["traceEvents"] if event.get("ph") == "X"]
    return {name: names.count(name) for name in sorted(set(names)) if name.startswith(prefix)}


class FakeRecorder:
    """Notes what is asked of it; writes an empty trace, or what it was told to."""

    def __init__(self, content: str = '{"traceEvents": []}') -> None:
        self.calls: list[str] = []
        self.content = content
        self.fails_at = ""

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fails_at:
            raise RuntimeError(f"cannot {call}")

    def start(self) -> None:
        self._note("start")

    def mark(self):
        self._note("mark")
        return nullcontext()

    def stop(self) -> None:
        self._note("stop")

    def write(self, path) -> None:
        self._note("write")
        path.write_text(self.content)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class TestStepProfile:
    def test_steps_are_recorded_until_there_are_enough(self):
        """
        A profile of two steps records the next two; the third runs as ever.
        """
        recorder = FakeRecorder()
        profile = StepProfile(recorder, ProfileOptions(num_steps=2))
        profile.begin()
        assert [0, 1, 2] == [profile.run_step(lambda at=at: at) for at in range(3)]
        assert ["start", "mark", "mark", "stop"] == recorder.calls
        assert (2, True) == (profile.num_steps, profile.is_recorded.is_set())

    def test_time_that_is_up_ends_it_before_the_next_step(self):
        """
        No step is recorded that begins after duration_s.
        """
        recorder, clock = FakeRecorder(), Clock()
        profile = StepProfile(recorder, ProfileOptions(duration_s=5.0), clock_s=clock)
        profile.begin()
        profile.run_step(lambda: None)
        clock.now_s += 5.0
        profile.run_step(lambda: None)
        assert ["start", "mark", "stop"] == recorder.calls
        assert 5.0 == profile.elapsed_s

    def test_failing_step_fails_as_ever(self):
        """
        An error of a recorded step is raised, and the step is not counted.
        """
        profile = StepProfile(FakeRecorder(), ProfileOptions())
        profile.begin()
        with pytest.raises(ZeroDivisionError):
            profile.run_step(lambda: 1 // 0)
        assert 0 == profile.num_steps

    @pytest.mark.parametrize("call", ["start", "stop"])
    def test_profiler_that_fails_leaves_steps_alone(self, call):
        """
        Steps run although the profiler raises; the profile is over and knows why.
        """
        recorder = FakeRecorder()
        recorder.fails_at = call
        profile = StepProfile(recorder, ProfileOptions(num_steps=1))
        profile.begin()
        assert [1, 2] == [profile.run_step(lambda at=at: at) for at in (1, 2)]
        profile.end()
        assert f"cannot {call}" == str(profile.error)
        assert 1 == recorder.calls.count(call)

    def test_ended_before_its_begin_records_nothing(self):
        """
        A profile that is no longer wanted when its turn comes never starts the profiler.
        """
        recorder = FakeRecorder()
        profile = StepProfile(recorder, ProfileOptions())
        profile.end()
        profile.begin()
        assert [] == recorder.calls


class Idle:
    """A runner thread without steps: does errands when it is told to."""

    def __init__(self) -> None:
        self.errands = []
        self.error = None
        self.profiles = Profiles(self.errands.append, lambda: self.error)

    def work(self) -> None:
        while self.errands:
            self.errands.pop(0)()


class TestProfiles:
    def test_without_steps_it_ends_when_time_is_up(self):
        """
        A profile during which no step comes gives an empty trace after duration_s.
        """
        recorder = FakeRecorder()
        prompt = Profiles(lambda errand: errand(), lambda: None)
        given = list(prompt.record(recorder, ProfileOptions(duration_s=0.05), lambda: True))
        assert ["start", "stop", "write"] == recorder.calls
        assert [0] == [one.num_steps for one in given if getattr(one, "is_recorded", False)]
        assert given[-1].sha256
        assert prompt.active is None

    def test_second_one_is_refused_until_the_first_is_over(self):
        """
        There is one profile at a time, up to the last byte of its trace.
        """
        idle = Idle()
        first = idle.profiles.record(FakeRecorder(), ProfileOptions(), lambda: True)
        next(first)
        with pytest.raises(ProfileRunning):
            next(idle.profiles.record(FakeRecorder(), ProfileOptions(), lambda: True))
        first.close()
        with pytest.raises(ProfileRunning):
            next(idle.profiles.record(FakeRecorder(), ProfileOptions(), lambda: True))
        idle.work()
        assert next(idle.profiles.record(FakeRecorder(), ProfileOptions(), lambda: True))

    def test_next_one_may_begin_once_a_caller_has_its_trace(self):
        """
        A caller that has a whole trace may have another at once: the runner is done with the first.
        """
        idle = Idle()
        call = idle.profiles.record(FakeRecorder(), ProfileOptions(num_steps=1), lambda: True)
        next(call)
        idle.work()
        for _ in range(2):
            idle.profiles.run_step(lambda: None)
        assert list(call)[-1].sha256
        assert next(idle.profiles.record(FakeRecorder(), ProfileOptions(), lambda: True))

    def test_caller_that_left_ends_the_recording(self):
        """
        A recording that its caller no longer wants stops the profiler, and no trace is written.
        """
        idle, recorder = Idle(), FakeRecorder()
        wanted = [True]
        call = idle.profiles.record(recorder, ProfileOptions(), lambda: wanted[0])
        next(call)
        idle.work()
        wanted[0] = False
        assert [] == list(call)
        idle.work()
        assert ["start", "stop"] == recorder.calls

    def test_stopping_executor_is_told_to_the_caller(self):
        """
        A profile of an executor that stops ends with the reason for that.
        """
        idle = Idle()
        call = idle.profiles.record(FakeRecorder(), ProfileOptions(), lambda: True)
        next(call)
        idle.error = Draining("the executor is stopping")
        with pytest.raises(Draining):
            next(call)

    def test_runner_that_ends_stops_the_profiler(self):
        """
        The profiler is not left running when no step follows, for whatever reason.
        """
        idle, recorder = Idle(), FakeRecorder()
        next(idle.profiles.record(recorder, ProfileOptions(), lambda: True))
        idle.work()
        idle.profiles.abandon()
        idle.profiles.abandon()
        assert ["start", "stop"] == recorder.calls

    def test_profiler_that_fails_is_an_error_of_the_call(self):
        """
        A profiler that raises ends the call with INTERNAL and its words, and the next may begin.
        """
        idle, recorder = Idle(), FakeRecorder()
        recorder.fails_at = "start"
        call = idle.profiles.record(recorder, ProfileOptions(), lambda: True)
        next(call)
        idle.work()
        with pytest.raises(InternalError, match="cannot start"):
            next(call)
        idle.work()
        assert next(idle.profiles.record(FakeRecorder(), ProfileOptions(), lambda: True))

    @pytest.mark.parametrize("content", ["", '{"traceEvents": [{"na'])
    def test_trace_cut_off_by_a_full_disk_is_never_sent(self, content, tmp_path):
        """
        A trace that is not complete is an error, not a shorter trace.
        """
        trace = tmp_path / "trace.json"
        trace.write_text(content)
        with pytest.raises(InternalError, match="make room"):
            next(trace_file.chunks(trace))

    def test_folder_that_cannot_be_written_is_named(self, monkeypatch, tmp_path):
        """
        The error says so when the temporary folder takes no file.
        """
        monkeypatch.setattr(profiles.tempfile, "tempdir", str(tmp_path / "missing"))
        prompt = Profiles(lambda errand: errand(), lambda: None)
        call = prompt.record(FakeRecorder(), ProfileOptions(duration_s=1e-9), lambda: True)
        with pytest.raises(InternalError, match="TMPDIR"):
            list(call)


class TestTraceFile:
    def test_large_trace_comes_in_chunks(self, tmp_path, monkeypatch):
        """
        A trace is cut into messages of at most the chunk size, the last of which has the checksum.
        """
        monkeypatch.setattr(trace_file, "MAX_CHUNK_BYTES", 64)
        content = json.dumps({"traceEvents": list(range(1000))})
        (tmp_path / "trace.json").write_text(content)
        chunks = list(trace_file.chunks(tmp_path / "trace.json"))
        whole = b"".join(chunk.chunk for chunk in chunks)
        assert content == gzip.decompress(whole).decode()
        assert 64 == max(len(chunk.chunk) for chunk in chunks)
        assert [hashlib.sha256(whole).hexdigest()] == [
            chunk.sha256 for chunk in chunks if chunk.sha256
        ]
        assert isinstance(chunks[-1], TraceChunk)

    def test_too_large_trace_is_refused(self, tmp_path, monkeypatch):
        """
        A trace over the limit is refused with the field that makes it smaller.
        """
        monkeypatch.setattr(trace_file, "MAX_TRACE_BYTES", 3)
        (tmp_path / "trace.json").write_text("{ }{}")
        with pytest.raises(InvalidParameter) as refused:
            next(trace_file.chunks(tmp_path / "trace.json"))
        assert "options.num_steps" == refused.value.field


class TestProfileCall:
    def test_trace_has_the_steps_and_their_parts(self, executor):
        """
        A profile of three steps has a span for each, and inside them the parts of a step, the
        operations of the model, and those of PyTorch; results are those of any other step.
        """
        assert FEATURE in executor.describe().features
        client = StepClient(executor)
        stream = client.attach()
        client.step(stream)
        call = executor.stub.Profile(
            request(num_steps=3, record_shapes=True, duration_s=60), timeout=DEADLINE_S
        )
        messages = [next(call)]
        wait_until(lambda: executor.server.profiles.active is not None)
        assert 5 == len(list(client.steps(stream, 5)))
        messages += list(call)
        found = spans(trace_of(messages))
        assert 3 == found["tandem.step"] == found["tandem.forward"] == found["tandem.sample"]
        # three steps of two layers
        assert 6 == found["tandem.attention"] == found["tandem.mlp"]
        assert spans(trace_of(messages), "aten::")
        assert [3] == [one.progress.num_steps for one in messages if one.progress.is_recorded]

    def test_steps_after_a_profile_are_not_recorded(self, executor):
        """
        Once a profile is over the next one starts from nothing, and may be had at once.
        """
        client = StepClient(executor)
        stream = client.attach()
        for num_steps in (1, 2):
            call = executor.stub.Profile(
                request(num_steps=num_steps, duration_s=60), timeout=DEADLINE_S
            )
            messages = [next(call)]
            wait_until(lambda: executor.server.profiles.active is not None)
            list(client.steps(stream, 3))
            messages += list(call)
            assert num_steps == spans(trace_of(messages))["tandem.step"]
        runner = executor.runner._runner
        assert not {"_apply", "_forward"} & vars(runner).keys()
        assert not {"_attention", "project"} & vars(runner._decoder).keys()

    def test_cancelled_call_leaves_the_executor_as_it_was(self, executor):
        """
        A caller that cancels frees the profiler, and steps go on.
        """
        client = StepClient(executor)
        stream = client.attach()
        call = executor.stub.Profile(request(duration_s=60), timeout=DEADLINE_S)
        next(call)
        wait_until(lambda: executor.server.profiles.active is not None)
        call.cancel()
        client.step(stream)
        wait_until(lambda: not executor.server.profiles._is_taken)
        again = executor.stub.Profile(request(duration_s=0.01), timeout=DEADLINE_S)
        assert trace_of(list(again))["traceEvents"] is not None

    @pytest.mark.parametrize(
        ("options", "field"),
        [
            ({"num_steps": 0}, "options.num_steps"),
            ({"num_steps": 101}, "options.num_steps"),
            ({"num_steps": 21, "with_stack": True}, "options.num_steps"),
            ({"duration_s": 0.0}, "options.duration_s"),
            ({"duration_s": 61.0}, "options.duration_s"),
            ({"duration_s": float("nan")}, "options.duration_s"),
        ],
    )
    def test_options_out_of_range_are_named(self, executor, options, field):
        """
        Steps and seconds outside their ranges are refused with their fields.
        """
        error = refusal(lambda: list(executor.stub.Profile(request(**options), timeout=DEADLINE_S)))
        assert (InvalidParameter, field) == (type(error), error.field)

    def test_executor_that_stops_ends_the_call(self, start):
        """
        A profile of an executor that is stopped ends with DRAINING.
        """
        executor = start()
        call = executor.stub.Profile(request(duration_s=60), timeout=DEADLINE_S)
        next(call)
        threading.Thread(target=executor.server.stop, daemon=True).start()
        error = refusal(lambda: list(call))
        assert isinstance(error, Draining)


def test_second_call_is_refused(executor):
    """
    While one caller's profile is recorded another's is refused with PROFILE_RUNNING.
    """
    call = executor.stub.Profile(request(duration_s=60), timeout=DEADLINE_S)
    next(call)
    with pytest.raises(grpc.RpcError):
        next(executor.stub.Profile(request(), timeout=DEADLINE_S))
    error = refusal(lambda: list(executor.stub.Profile(request(), timeout=DEADLINE_S)))
    assert isinstance(error, ProfileRunning)
    call.cancel()
