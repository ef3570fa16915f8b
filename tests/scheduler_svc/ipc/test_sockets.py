import select
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from scheduler_svc.ipc import snapshot
from scheduler_svc.ipc.messages import (
    Accepted,
    Availability,
    CoreMessage,
    EndStream,
    FrontendMessage,
    Hello,
    Model,
    Query,
    Refused,
    Reply,
    StreamEnd,
    StreamProgress,
    Submit,
    Update,
)
from scheduler_svc.ipc.sockets import PIPE_MESSAGES, CoreSocket, FrontendGone
from tandem.admin.v1.stats_pb2 import GetStatsResponse
from tandem.sampling_params import SamplingParams
from tests.scheduler_svc.ipc.frontend_socket import FrontendSocket

DEADLINE_S = 60.0

REFUSED = Refused(
    stream_id=7,
    reason="QUEUE_FULL",
    message="256 requests are in the system",
    field=None,
    retry_after_s=1.0,
    metadata={"limit": "max_num_seqs"},
)

FROM_FRONTEND: list[FrontendMessage] = [
    Hello(0, 4242),
    Submit(
        stream_id=2**32 - 1,
        request_id="r",
        prompt=b"\x01\x00\x00\x00",
        sampling=SamplingParams(
            temperature=0.5, seed=2**64 - 1, end_ids=(2,), logit_bias=((3, -1.5),), logprobs=2
        ),
        max_tokens=3,
        eos_token_ids=(2,),
        stop_token_ids=(),
        arrival_s=1.25,
        deadline_s=None,
    ),
    EndStream(stream_id=3, reason=7, num_output_tokens=None),
    Query(query_id=1, kind="stats", argument=b"{}"),
]

FROM_CORE: list[CoreMessage] = [
    Model(
        name="m",
        revision="f" * 64,
        architecture="LlamaForCausalLM",
        dtype="float32",
        vocab_size=512,
        max_model_len=256,
        eos_token_ids=(0, 2),
        default_sampling=SamplingParams(top_k=20),
        tokenizer_dir="/run/x",
    ),
    Availability(executor_attached=True, ready=True, draining=False),
    Accepted(5),
    REFUSED,
    Update(
        token_stream=b"\x05\x00\x00\x00",
        token_offset=b"\x00\x00\x00\x00",
        token=b"\x09\x00\x00\x00",
        ended=(
            StreamEnd(
                stream_id=5,
                reason=1,
                matched_token=None,
                num_prompt_tokens=1,
                num_output_tokens=1,
                num_cached_tokens=0,
                queue_s=0.0,
                first_token_s=None,
                total_s=0.5,
                num_preemptions=0,
            ),
        ),
        failed=(REFUSED,),
        progress=(StreamProgress(5, 1, 0),),
    ),
    Reply(query_id=1, result=b"{}", error=None),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ipc" / "core.sock"


@pytest.fixture
def core(path: Path) -> Iterator[CoreSocket]:
    socket = CoreSocket(path)
    yield socket
    socket.close()


@pytest.fixture
def frontend(core: CoreSocket, path: Path) -> Iterator[FrontendSocket]:
    socket = FrontendSocket(path, 3)
    yield socket
    socket.close()


def _receive(core: CoreSocket) -> tuple[int, FrontendMessage]:
    while not core.has_messages:
        assert select.select([core], [], [], DEADLINE_S)[0]
    (received,) = core.receive(at_most=1)
    return received


class TestCoreSocket:
    def test_every_frontend_message_arrives_equal_and_with_its_sender(self, core, frontend):
        """Each message of a frontend arrives unchanged, in order, with the index of its sender."""
        for message in FROM_FRONTEND:
            frontend.send(message)
        assert [(3, message) for message in FROM_FRONTEND] == [
            _receive(core) for _ in FROM_FRONTEND
        ]

    def test_every_core_message_arrives_equal(self, core, frontend):
        """Each message of the core arrives unchanged and in order at the frontend it names."""
        frontend.send(Hello(3, 1))
        _receive(core)
        assert all(core.try_send(3, message) for message in FROM_CORE)
        assert [frontend.receive(DEADLINE_S) for _ in FROM_CORE] == FROM_CORE

    def test_full_pipe_refuses_without_waiting(self, core, frontend):
        """A frontend that does not read makes try_send say False, and what was sent stays."""
        frontend.send(Hello(3, 1))
        _receive(core)
        sent = 0
        # A frame larger than any kernel buffer, so that only the pipe itself can hold it.
        big = Reply(query_id=0, result=b" " * 1_000_000, error=None)
        while core.try_send(3, big):
            sent += 1
            assert sent <= 4 * PIPE_MESSAGES
        assert [big] * sent == [frontend.receive(DEADLINE_S) for _ in range(sent)]

    def test_unknown_frontend_is_gone(self, core):
        """Sending to a frontend that never connected says so instead of dropping the message."""
        with pytest.raises(FrontendGone):
            core.try_send(9, Accepted(1))

    def test_garbage_raises_and_is_consumed(self, core, frontend):
        """A frame that is no message raises once and does not block the next one."""
        frontend._socket.send(b"\xc1garbage")
        frontend.send(Hello(3, 1))
        with pytest.raises(msgspec.DecodeError):
            _receive(core)
        assert (3, Hello(3, 1)) == _receive(core)

    def test_socket_is_private(self, core, path):
        """The directory can be entered, and the socket read and written, by this user only."""
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def test_too_long_path_is_refused(self, tmp_path):
        """A path that a unix socket cannot hold is refused with what to do."""
        with pytest.raises(ValueError, match="shorter TMPDIR"):
            CoreSocket(tmp_path / ("x" * 120))


class TestSnapshots:
    def test_metrics_round_trip(self):
        """A metrics snapshot survives its JSON form."""
        histogram = snapshot.HistogramSnapshot(
            upper_bounds=(0.1, 1.0), cumulative_counts=(1, 2), count=3, total=4.5
        )
        metrics = snapshot.MetricsSnapshot(
            stats=GetStatsResponse(running_requests=2, refused_by_limit={"a": 1}),
            ready=True,
            finished_by_reason={"EOS": 3},
            failed_by_reason={},
            refused_by_reason={"QUEUE_FULL": 1},
            histograms={"inter_token_latency": histogram},
        )
        assert metrics == snapshot.decode_metrics(snapshot.encode_json(metrics))
