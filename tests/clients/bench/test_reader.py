"""The reader of many streams against a server that sends what the test says."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import psutil
import pytest

from tandem.inference.v1 import stream_pb2
from tandem.inference.v1.inference_service_pb2 import GenerateRequest, GenerateResponse
from tandem_bench.reader import ReadCounts, Reader, start_reader
from tandem_bench.reader.readers import ReaderFailed

METHOD = "/tandem.inference.v1.InferenceService/Generate"
DEADLINE_S = 60.0
Behavior = Callable[[GenerateRequest, grpc.aio.ServicerContext], AsyncIterator[bytes]]


@asynccontextmanager
async def serving(behavior: Behavior, address: str) -> AsyncIterator[str]:
    """Serve the test's own Generate, and yield the address that it listens on."""
    handler = grpc.unary_stream_rpc_method_handler(
        behavior, request_deserializer=GenerateRequest.FromString
    )
    generic = grpc.method_handlers_generic_handler(
        "tandem.inference.v1.InferenceService", {"Generate": handler}
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((generic,))
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield address if address.startswith("unix:") else f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def delta(offset: int, ids: list[int], text: str = "", choice: int = 0) -> bytes:
    message = stream_pb2.Delta(choice=choice, first_token_offset=offset, token_ids=ids, text=text)
    return GenerateResponse(delta=message).SerializeToString()


STARTED = GenerateResponse(started={"request_id": "r"}).SerializeToString()
FINISHED = GenerateResponse(finished={"choice": 0}).SerializeToString()


def done(num_tokens: int) -> bytes:
    return GenerateResponse(done={"usage": {"output_tokens": num_tokens}}).SerializeToString()


def asked(num_tokens: int) -> bytes:
    return GenerateRequest(
        token_ids={"ids": [1, 2, 3]}, stopping={"max_tokens": num_tokens}
    ).SerializeToString()


async def read_until(
    address: str,
    requests: list[bytes],
    condition: Callable[[ReadCounts], bool],
    **options: int,
) -> ReadCounts:
    """Return the first report for which the condition holds."""

    def read() -> ReadCounts:
        with start_reader(address, requests, **options) as reader:
            return wait_for(reader.report, condition)

    return await asyncio.to_thread(read)


def wait_for(
    report: Callable[[], ReadCounts], condition: Callable[[ReadCounts], bool]
) -> ReadCounts:
    deadline_s = report().time_s + DEADLINE_S
    while not condition(counts := report()):
        assert counts.time_s < deadline_s, counts
    return counts


async def whole(
    request: GenerateRequest, context: grpc.aio.ServicerContext
) -> AsyncIterator[bytes]:
    """
    Send as many tokens as asked for, the last message longer than a frame and a stream's window.
    """
    del context
    yield STARTED
    num_tokens = request.stopping.max_tokens
    yield delta(0, [7], "é")
    yield delta(1, [8] * (num_tokens - 1), "x" * 100_000)
    yield FINISHED
    yield done(num_tokens)


class TestReading:
    @pytest.mark.parametrize("listen", ["127.0.0.1:0", "unix"])
    async def test_everything_is_counted(self, listen, tmp_path):
        """
        Messages, tokens, text and ends of all streams are counted, over TCP and a unix socket.
        """
        listen = f"unix:{tmp_path}/socket" if listen == "unix" else listen
        async with serving(whole, listen) as address:
            counts = await read_until(
                address, [asked(10), asked(20), asked(30)], lambda c: c.over == 3
            )
        assert (3, 15, 6, 60) == (counts.streams, counts.messages, counts.deltas, counts.tokens)
        assert 3 * 100_002 == counts.text_bytes
        assert (3, 3, 3, 60) == (
            counts.started, counts.finished, counts.done, counts.done_tokens,
        )  # fmt: skip
        assert ({"0": 3}, 0, 0) == (counts.statuses, counts.failed, counts.bad_offsets)

    async def test_streams_are_shared_by_processes_and_connections(self):
        """
        Reports of several processes, each with several connections, are added up.
        """
        async with serving(whole, "127.0.0.1:0") as address:
            counts = await read_until(
                address, [asked(5)] * 9, lambda c: c.over == 9, num_processes=2, connections=3
            )
        assert (9, 45, {"0": 9}) == (counts.streams, counts.tokens, counts.statuses)

    async def test_long_requests_arrive_whole(self):
        """
        Requests longer than what a server takes at once are sent as it takes them.
        """
        sizes = []

        async def measure(request, context):
            sizes.append(len(request.token_ids.ids))
            yield done(0)

        request = GenerateRequest(token_ids={"ids": range(100_000)}).SerializeToString()
        async with serving(measure, "127.0.0.1:0") as address:
            counts = await read_until(address, [request] * 3, lambda c: c.over == 3, connections=1)
        assert ([100_000] * 3, {"0": 3}) == (sizes, counts.statuses)

    async def test_gaps_and_repetitions_are_noticed(self):
        """
        A delta that does not begin where its choice's last one ended is counted; choices do not
        mix.
        """

        async def wrong(request, context):
            yield delta(0, [1, 2])
            yield delta(0, [3], choice=1)
            yield delta(3, [4])
            yield delta(3, [4])
            yield delta(1, [5], choice=1)
            yield delta(4, [5])

        async with serving(wrong, "127.0.0.1:0") as address:
            counts = await read_until(address, [asked(1)], lambda c: c.over == 1)
        assert (6, 7, 2) == (counts.deltas, counts.tokens, counts.bad_offsets)

    async def test_failed_streams_are_told_by_status(self):
        """
        A stream that ends with an error is counted under its status, whatever came before.
        """

        async def fail(request, context):
            yield delta(0, [1])
            if request.stopping.max_tokens == 1:
                await context.abort(grpc.StatusCode.ABORTED, "too slow")
            yield done(1)

        async with serving(fail, "127.0.0.1:0") as address:
            counts = await read_until(
                address, [asked(1), asked(2), asked(1)], lambda c: c.over == 3
            )
        assert ({"0": 1, "10": 2}, 2) == (counts.statuses, counts.failed)

    async def test_lost_server_fails_all_streams(self):
        """
        Streams fail when their connection breaks.
        """

        async def endless(request, context):
            yield delta(0, [1])
            await asyncio.sleep(3600)

        def read(address: str, stop: Callable[[], None]) -> ReadCounts:
            with start_reader(address, [asked(1)] * 2) as reader:
                wait_for(reader.report, lambda counts: counts.tokens == 2)
                stop()
                return wait_for(reader.report, lambda counts: counts.over == 2)

        loop = asyncio.get_running_loop()
        async with serving(endless, "127.0.0.1:0") as address:
            stopped = asyncio.Event()
            reading = asyncio.create_task(
                asyncio.to_thread(read, address, lambda: loop.call_soon_threadsafe(stopped.set))
            )
            await stopped.wait()
        assert 2 == (await reading).failed


class TestStalling:
    async def test_stalled_streams_get_a_window_and_later_the_rest(self):
        """
        Streams that do not read hold up their own server and no other; read again, they get all.
        """
        sent = [0, 0, 0, 0]
        total = 100
        loop, are_stalled = asyncio.get_running_loop(), asyncio.Event()

        async def steady(request, context):
            for index in range(total):
                if index == 2:
                    await are_stalled.wait()
                yield delta(index, [index], "x" * 10_000)
                sent[request.stopping.max_tokens] += 1

        def read(address: str) -> ReadCounts:
            requests = [asked(index) for index in range(4)]
            with start_reader(address, requests, connections=1) as reader:
                wait_for(reader.report, lambda counts: counts.tokens == 8)
                stalled = reader.stall(2)
                assert 2 == stalled.stalled
                loop.call_soon_threadsafe(are_stalled.set)
                counts = wait_for(reader.report, lambda counts: counts.over == 2)
                assert ({"0": 2}, {}) == (counts.statuses, counts.stalled_statuses)
                assert counts.stalled_tokens < 2 * total
                assert max(sent[2:]) < total
                reader.resume()
                return wait_for(reader.report, lambda counts: counts.over == 4)

        async with serving(steady, "127.0.0.1:0") as address:
            counts = await asyncio.to_thread(read, address)
        assert ({"0": 2}, {"0": 2}, 0) == (
            counts.statuses, counts.stalled_statuses, counts.bad_offsets,
        )  # fmt: skip
        assert (2 * total, 4 * total) == (counts.stalled_tokens, counts.tokens)


class TestStarting:
    def test_reader_that_takes_no_requests_is_an_error(self):
        """
        All processes are ended, with an error, when one ends before it took its requests.
        """
        before = set(psutil.Process().children())
        with pytest.raises(ReaderFailed, match="ended with 1"):
            Reader(["false"], [bytes(1 << 20)] * 2, num_processes=2)
        assert set(psutil.Process().children()) <= before

    def test_unreachable_server_fails_every_stream(self):
        """
        A server that cannot be reached fails the streams as UNAVAILABLE.
        """
        with start_reader("127.0.0.1:1", [asked(1)]) as reader:
            assert {"14": 1} == wait_for(reader.report, lambda counts: counts.over == 1).statuses
