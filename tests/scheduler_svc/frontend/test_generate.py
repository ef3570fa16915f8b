"""Generate and Complete over a real gRPC connection, the core played by the test."""

from scheduler_svc.core.events import ProgressKind
from scheduler_svc.core.request import FinishReason
from scheduler_svc.ipc.messages import StreamProgress
from tandem.inference.v1 import inference_service_pb2 as pb
from tests.scheduler_svc.frontend.fake_core import ended, within


class TestGenerate:
    async def test_request_runs_streams_grammar_in_order(self, frontend, stub):
        """
        A stream is Started, Progress, Deltas, Finished, Done.
        """
        call = stub.Generate(pb.GenerateRequest(token_ids={"ids": [5, 6, 7]}, request_id="mine"))
        stream_id = await frontend.core.accept()
        progress = StreamProgress(stream_id, ProgressKind.SCHEDULED, 2)
        await frontend.core.tokens(stream_id, 0, [], progress=progress)
        events = [await within(call.read()), await within(call.read())]
        await frontend.core.tokens(stream_id, 0, [70])
        events.append(await within(call.read()))
        end = ended(stream_id, FinishReason.EOS, 2, matched_token=1)
        await frontend.core.tokens(stream_id, 1, [1], end=end)
        events += [await within(call.read()) for _ in range(3)]
        kinds = [event.WhichOneof("event") for event in events]
        assert ["started", "progress", "delta", "delta", "finished", "done"] == kinds
