"""Generate and Complete over a real gRPC connection, the core played by the test."""

import time

import numpy as np
import pytest

from scheduler_svc.core.request.events import ProgressKind
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.ipc.messages import Accepted, Availability, Refused, StreamProgress, Update
from tandem.errors import (
    InvalidLogits,
    QueueFull,
)
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.inference.v1 import model_pb2
from tests.scheduler_svc.frontend.calls import error_of, kinds, rest_of, stub_of
from tests.scheduler_svc.frontend.fake_core import (
    ended,
    model,
    refused,
    running_frontend,
    serve,
    until,
    within,
)
from tests.scheduler_svc.frontend.small_models import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
EOS = 1


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def request(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(**({"token_ids": {"ids": [5, 6, 7]}} | fields))


class TestGrammar:
    async def test_progress_that_comes_with_tokens_stands_before_them(self, frontend, stub):
        """
        A prompt's last progress and its first token arrive together, and leave in that order.
        """
        call = stub.Generate(request())
        stream_id = await frontend.core.accept()
        await within(call.read())
        prefilled = StreamProgress(stream_id, ProgressKind.PREFILLED, 3)
        ids = ids_of("the")
        end = ended(stream_id, FinishReason.EOS, len(ids) + 1, matched_token=EOS)
        await frontend.core.tokens(stream_id, 0, [*ids, EOS], progress=prefilled, end=end)
        assert ["progress", "delta", "finished", "done"] == kinds(await rest_of(call))

    async def test_request_runs_from_started_to_done(self, frontend, stub):
        """
        A stream is Started, Progress, Deltas, Finished, Done, with everything that the core said.
        """
        call = stub.Generate(request(request_id="mine", sampling={"seed": 9}))
        stream_id = await frontend.core.accept()
        scheduled = StreamProgress(stream_id, ProgressKind.SCHEDULED, 2)
        await frontend.core.tokens(stream_id, 0, [], progress=scheduled)
        messages = [await within(call.read()), await within(call.read())]
        await frontend.core.tokens(stream_id, 0, ids_of("the"))
        messages.append(await within(call.read()))
        count = len(ids_of("the"))
        end = ended(stream_id, FinishReason.EOS, count + 1, matched_token=EOS)
        await frontend.core.tokens(stream_id, count, [EOS], end=end)
        messages += await rest_of(call)

        assert ["started", "progress", "delta", "delta", "finished", "done"] == kinds(messages)
        started, progress, first, last, finished, done = messages
        assert ("mine", 3, "rev-1") == (
            started.started.request_id,
            started.started.prompt_tokens,
            started.started.model_revision,
        )
        assert 2 == progress.progress.scheduled.cached_tokens
        assert (0, ids_of("the"), "the") == (
            first.delta.first_token_offset,
            list(first.delta.token_ids),
            first.delta.text,
        )
        assert (count, [EOS], "") == (
            last.delta.first_token_offset,
            list(last.delta.token_ids),
            last.delta.text,
        )
        assert (FinishReason.EOS, EOS) == (finished.finished.reason, finished.finished.token_id)
        assert (3, count + 1, 2) == (
            done.done.usage.prompt_tokens,
            done.done.usage.output_tokens,
            done.done.usage.cached_tokens,
        )
        timings = done.done.timings
        assert (0.25, 0.5, 1.5, 1) == (
            timings.queue_s,
            timings.time_to_first_token_s,
            timings.total_s,
            timings.preemptions,
        )

    async def test_submission_carries_everything_resolved(self, frontend, stub):
        """
        The core gets ids and parameters with every default filled in, and times of its own clock.
        """
        before_s = time.monotonic()
        call = stub.Generate(
            request(
                request_id="mine",
                sampling={"temperature": 0.5, "top_k": 7, "seed": 2**64 - 1},
                stopping={"max_tokens": 11, "stop_token_ids": [40, 41]},
                time_limit_s=5,
            )
        )
        submit = await within(frontend.core.submits.get())
        call.cancel()
        assert [5, 6, 7] == np.frombuffer(submit.prompt, "<i4").tolist()
        assert ("mine", 0.5, 7, 0.5, 2**64 - 1, 11, (EOS,), (40, 41)) == (
            submit.request_id,
            submit.sampling.temperature,
            submit.sampling.top_k,
            submit.sampling.top_p,
            submit.sampling.seed,
            submit.max_tokens,
            submit.eos_token_ids,
            submit.stop_token_ids,
        )
        assert before_s <= submit.arrival_s <= time.monotonic()
        assert pytest.approx(submit.arrival_s + 5) == submit.deadline_s

    @pytest.mark.parametrize(
        ("prompt_len", "max_tokens", "expected"),
        [(3, None, (100, False)), (200, None, (56, True)), (200, 56, (56, False))],
    )
    async def test_unset_max_tokens_may_fill_the_context(
        self, frontend, stub, prompt_len, max_tokens, expected
    ):
        """
        An unset max_tokens is 100 or what the context has left; in that case the context ends the
        output.
        """
        stopping = {} if max_tokens is None else {"max_tokens": max_tokens}
        call = stub.Generate(request(token_ids={"ids": [5] * prompt_len}, stopping=stopping))
        submit = await within(frontend.core.submits.get())
        call.cancel()
        assert expected == (submit.max_tokens, submit.fills_context)

    async def test_unset_id_and_seed_are_chosen_and_told(self, frontend, stub):
        """
        An id and seed that the server chose are in Started, differ between requests, and reach the
        core.
        """
        chosen = set()
        for _ in range(2):
            call = stub.Generate(request())
            submit = await within(frontend.core.submits.get())
            await frontend.core.send(refused(submit.stream_id, QueueFull("full")))
            await error_of(call)
            chosen |= {submit.request_id, submit.sampling.seed}
        assert 4 == len(chosen)

    @pytest.mark.parametrize(
        ("progress", "field", "value"),
        [
            (ProgressKind.QUEUED, "queued", "position"),
            (ProgressKind.SCHEDULED, "scheduled", "cached_tokens"),
            (ProgressKind.PREFILLED, "prefilled", "done_tokens"),
        ],
    )
    async def test_each_progress_has_its_message(self, frontend, stub, progress, field, value):
        """
        Every kind of progress reaches the client in its own message.
        """
        call = stub.Generate(request())
        stream_id = await frontend.core.accept()
        await within(call.read())
        news = StreamProgress(stream_id, progress, 5)
        await frontend.core.tokens(stream_id, 0, [], progress=news)
        message = await within(call.read())
        call.cancel()
        assert 5 == getattr(getattr(message.progress, field), value)

    async def test_what_was_found_is_told_though_more_came_meanwhile(self, frontend, stub):
        """
        Scheduled is not replaced by a later progress of the prompt while both wait for the client.
        """
        call = stub.Generate(request())
        stream_id = await frontend.core.accept()
        await within(call.read())
        scheduled = StreamProgress(stream_id, ProgressKind.SCHEDULED, 2)
        prefilled = StreamProgress(stream_id, ProgressKind.PREFILLED, 3)
        await frontend.core.send(
            Update(
                token_stream=b"",
                token_offset=b"",
                token=b"",
                ended=(),
                failed=(),
                progress=(scheduled, prefilled),
            )
        )
        message = await within(call.read())
        call.cancel()
        assert 2 == message.progress.scheduled.cached_tokens

    @pytest.mark.slow
    async def test_silent_stream_repeats_its_progress(self, tmp_path, model_dir):
        """
        A silent stream repeats its last known state again and again.
        """
        async with running_frontend(tmp_path, progress_interval_s=0.0) as frontend:
            await serve(frontend, model(model_dir))
            call = stub_of(frontend).Generate(request())
            stream_id = await frontend.core.accept()
            news = StreamProgress(stream_id, ProgressKind.QUEUED, 4)
            await frontend.core.tokens(stream_id, 0, [], progress=news)
            messages = [await within(call.read())]
            while messages[-1].progress.queued.position != 4:  # the news has not come yet
                messages.append(await within(call.read()))
            again = [await within(call.read()) for _ in range(2)]
            call.cancel()
        assert ["started", *["progress"] * (len(messages) - 1)] == kinds(messages)
        assert [messages[-1]] * 2 == again

    @pytest.mark.slow
    async def test_progress_says_why_nothing_is_computed(self, tmp_path, model_dir):
        """
        Every progress says why no step is computed, as long as the core computes none.
        """
        async with running_frontend(tmp_path, progress_interval_s=0.0) as frontend:
            await serve(frontend, model(model_dir))
            call = stub_of(frontend).Generate(request())
            await frontend.core.accept()
            await within(call.read())
            for why in ("an operator suspended it", ""):
                availability = Availability(
                    executor_attached=True, ready=not why, draining=False, blocked_by=why
                )
                await frontend.core.send(availability)
                message = await within(call.read())
                while message.progress.blocked_by != why:
                    message = await within(call.read())
            call.cancel()

    async def test_deadline_keeps_partial_output(self, frontend, stub):
        """
        An end by time limit is a normal end with the output up to then, half characters included.
        """
        call = stub.Generate(request())
        stream_id = await frontend.core.accept()
        half = ids_of("😀")[:1]
        end = ended(stream_id, FinishReason.DEADLINE, 1)
        await frontend.core.tokens(stream_id, 0, half, end=end)
        messages = await rest_of(call)
        assert ["started", "delta", "finished", "done"] == kinds(messages)
        assert (half, "\ufffd") == (list(messages[1].delta.token_ids), messages[1].delta.text)
        assert FinishReason.DEADLINE == messages[2].finished.reason


class TestStopString:
    async def test_stop_across_tokens_ends_the_request_in_the_core(self, frontend, stub):
        """
        A stop string ends the text before itself; the core is told the token that completed it, and
        its answer ends the stream, though it had computed further tokens.
        """
        call = stub.Generate(request(stopping={"stop": ["the end"]}))
        stream_id = await frontend.core.accept()
        ids = [*ids_of("so the e"), *ids_of("nd. More")]
        for at, token_id in enumerate(ids):
            await frontend.core.tokens(stream_id, at, [token_id])
        told = await within(frontend.core.ends.get())
        consumed = TOKENIZER.decode(ids[: told.num_output_tokens])
        assert (stream_id, FinishReason.STOP_STRING) == (told.stream_id, told.reason)
        assert "the end" in consumed
        assert "the end" not in TOKENIZER.decode(ids[: told.num_output_tokens - 1])
        inbox = frontend.client.streams._inboxes[stream_id]
        await frontend.core.tokens(stream_id, len(ids), ids_of("x"))
        await until(
            lambda: inbox.choices[0].num_received > len(ids) and not inbox._something._is_rung
        )
        end = ended(stream_id, FinishReason.STOP_STRING, told.num_output_tokens)
        await frontend.core.tokens(stream_id, 0, [], end=end)
        messages = await rest_of(call)
        deltas = [message.delta for message in messages if message.HasField("delta")]
        assert "so " == "".join(delta.text for delta in deltas)
        sent = [token_id for delta in deltas for token_id in delta.token_ids]
        assert ids[: told.num_output_tokens] == sent
        assert "the end" == messages[-2].finished.stop_string
        assert FinishReason.STOP_STRING == messages[-2].finished.reason
        assert told.num_output_tokens == messages[-1].done.usage.output_tokens
        assert frontend.core.ends.empty()

    async def test_stop_string_beats_a_later_end_of_the_core(self, frontend, stub):
        """
        The end with the smaller token offset wins over the core's own end that came meanwhile.
        """
        call = stub.Generate(request(stopping={"stop": ["x"]}))
        stream_id = await frontend.core.accept()
        ids = [*ids_of("ax"), *ids_of("bb"), EOS]
        end = ended(stream_id, FinishReason.EOS, len(ids), matched_token=EOS)
        await frontend.core.tokens(stream_id, 0, ids, end=end)
        messages = await rest_of(call)
        assert (FinishReason.STOP_STRING, "x") == (
            messages[-2].finished.reason,
            messages[-2].finished.stop_string,
        )
        assert len(ids_of("ax")) == messages[-1].done.usage.output_tokens

    async def test_stop_token_has_no_text(self, frontend, stub):
        """
        A token of stop_token_ids ends the text before itself, though it has text elsewhere.
        """
        stop = ids_of("x")[0]
        call = stub.Generate(request(stopping={"stop_token_ids": [stop]}))
        stream_id = await frontend.core.accept()
        end = ended(stream_id, FinishReason.STOP_TOKEN, 2, matched_token=stop)
        await frontend.core.tokens(stream_id, 0, [*ids_of("a"), stop], end=end)
        messages = await rest_of(call)
        assert "a" == "".join(message.delta.text for message in messages)
        assert stop == messages[-2].finished.token_id


class TestComplete:
    async def test_whole_text_is_that_of_the_stream(self, frontend, stub):
        """
        Complete gives in one answer what Generate streams.
        """
        call = stub.Complete(pb.CompleteRequest(request=request(request_id="mine")))
        stream_id = await frontend.core.accept()
        ids = ids_of("the 😀")
        for at, token_id in enumerate(ids):
            await frontend.core.tokens(stream_id, at, [token_id])
        end = ended(stream_id, FinishReason.EOS, len(ids) + 1, matched_token=EOS)
        await frontend.core.tokens(stream_id, len(ids), [EOS], end=end)
        response = await within(call)
        (completion,) = response.completions
        assert ("the 😀", [*ids, EOS], FinishReason.EOS, EOS) == (
            completion.text,
            list(completion.token_ids),
            completion.reason,
            completion.token_id,
        )
        assert ("mine", len(ids) + 1) == (
            response.started.request_id,
            response.done.usage.output_tokens,
        )

    async def test_error_path_begins_at_the_request(self, stub):
        """
        Field paths of Complete go through its `request` field.
        """
        bad = request(sampling={"temperature": 3.0})
        error = await error_of(stub.Complete(pb.CompleteRequest(request=bad)))
        assert "request.sampling.temperature" == error.field


class TestFailure:
    async def test_failed_request_keeps_what_was_produced(self, frontend, stub):
        """
        Output that came before a failure is sent before the status.
        """
        call = stub.Generate(request())
        stream_id = await frontend.core.accept()
        failure = InvalidLogits("NaN at position 4")
        await frontend.core.tokens(stream_id, 0, ids_of("a"), failure=failure)
        messages = [await within(call.read()), await within(call.read())]
        error = await error_of(call)
        assert "a" == messages[1].delta.text
        assert ("INVALID_LOGITS", "DATA_LOSS") == (error.reason, error.code)

    async def test_lost_token_is_never_papered_over(self, frontend, stub):
        """
        A gap in the token offsets fails the request and ends it in the core.
        """
        call = stub.Generate(request())
        stream_id = await frontend.core.accept()
        await frontend.core.tokens(stream_id, 0, [70])
        await frontend.core.tokens(stream_id, 2, [71])
        error = await error_of(call)
        assert "INTERNAL" == error.reason
        assert "output token 1 was lost between core and frontend" == error.message
        assert stream_id == (await within(frontend.core.ends.get())).stream_id

    async def test_end_that_counts_more_tokens_than_came_is_an_error(self, frontend, stub):
        """
        An end with a count that does not match the tokens that arrived is an error, not a complete
        output.
        """
        call = stub.Generate(request())
        stream_id = await frontend.core.accept()
        await frontend.core.tokens(
            stream_id, 0, [70, 71], end=ended(stream_id, FinishReason.MAX_TOKENS, 3)
        )
        error = await error_of(call)
        assert "INTERNAL" == error.reason
        assert "choice 0 ended after 3 output tokens, but 2 arrived" == error.message

    async def test_repeated_tokens_are_sent_once(self, frontend, stub):
        """
        Tokens that a merged message brings again are dropped by their offsets.
        """
        call = stub.Generate(request())
        stream_id = await frontend.core.accept()
        await frontend.core.tokens(stream_id, 0, [70, 71])
        end = ended(stream_id, FinishReason.MAX_TOKENS, 3)
        await frontend.core.tokens(stream_id, 0, [70, 71, 72], end=end)
        messages = await rest_of(call)
        sent = [token_id for message in messages for token_id in message.delta.token_ids]
        assert [70, 71, 72] == sent

    async def test_garbage_bytes_are_a_typed_error(self, frontend):
        """
        Bytes that are no request are INVALID_ARGUMENT, and the service goes on.
        """
        garbage = frontend.channel.unary_stream("/tandem.inference.v1.InferenceService/Generate")
        error = await error_of(garbage(b"\xff\xff\xff\xff"))
        assert ("INVALID_PARAMETER", "INVALID_ARGUMENT") == (error.reason, error.code)
        assert (
            "not a valid message for /tandem.inference.v1.InferenceService/Generate"
            in error.message
        )
        assert "small" == (await stub_of(frontend).GetModel(model_pb2.GetModelRequest())).model.name

    async def test_bug_is_internal_without_a_trace(self, frontend, stub, monkeypatch):
        """
        An unforeseen exception becomes INTERNAL with a plain sentence.
        """

        def broken(*_: object) -> None:
            raise RuntimeError("secret detail")

        monkeypatch.setattr(frontend.client, "submit", broken)
        error = await error_of(stub.Generate(request()))
        assert "INTERNAL" == error.reason
        assert "secret" not in error.message

    async def test_long_error_text_still_arrives(self, frontend, stub):
        """
        A sentence too long for a trailer is cut, so that reason and code arrive.
        """
        call = stub.Generate(request())
        submit = await within(frontend.core.submits.get())
        long = Refused(
            stream_id=submit.stream_id,
            reason="CHAT_TEMPLATE",
            message="é" * 50_000,
            field="chat",
            retry_after_s=None,
            metadata={},
        )
        await frontend.core.send(long)
        error = await error_of(call)
        assert ("CHAT_TEMPLATE", "chat") == (error.reason, error.field)


class TestManyStreams:
    async def test_one_update_reaches_every_stream_with_its_own_tokens(self, frontend, stub):
        """
        Tokens of many requests travel in one message, interleaved, and each request gets its own.
        """
        count, length = 40, 5
        calls = {
            f"r{at}": stub.Complete(pb.CompleteRequest(request=request(request_id=f"r{at}")))
            for at in range(count)
        }
        streams = {}
        for _ in calls:
            submit = await within(frontend.core.submits.get())
            streams[submit.request_id] = submit.stream_id
            await frontend.core.send(Accepted(submit.stream_id))
        ids = np.array(list(streams.values()), "<u4")
        for offset in range(length):
            await frontend.core.send(
                Update(
                    token_stream=ids.tobytes(),
                    token_offset=np.full(count, offset, "<i4").tobytes(),
                    token=(ids.astype("<i4") + 10 + offset).tobytes(),
                    ended=tuple(
                        ended(stream, FinishReason.MAX_TOKENS, length)
                        for stream in streams.values()
                        if offset == length - 1
                    ),
                    failed=(),
                    progress=(),
                )
            )
        for name, call in calls.items():
            (completion,) = (await within(call)).completions
            first = streams[name] + 10
            assert list(range(first, first + length)) == list(completion.token_ids)
