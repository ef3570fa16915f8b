"""
Prompts, refusals, Abort and GetModel over a real gRPC connection, the core played by the test.
"""

import asyncio
import threading

import grpc
import numpy as np
import pytest

from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.frontend.text.tokenizer import TextModel
from scheduler_svc.ipc.messages import Availability
from tandem.errors import (
    DuplicateRequestId,
    NeverFits,
    QueueFull,
    RequestNotFound,
)
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.inference.v1 import model_pb2
from tandem.inference.v1.model_pb2 import ModelCapabilities
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


def chat(content: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}]}


class TestPrompt:
    @pytest.mark.parametrize("text", ["hello", "the quick brown fox " * 200], ids=["short", "long"])
    async def test_text_is_tokenized(self, tmp_path, model_dir, text):
        """
        A text becomes BOS and its tokens, whether it is short or long.
        """
        async with running_frontend(tmp_path) as frontend:
            await serve(frontend, model(model_dir, max_model_len=8192))
            call = stub_of(frontend).Generate(pb.GenerateRequest(text=text))
            submit = await within(frontend.core.submits.get())
            call.cancel()
        assert [0, *ids_of(text)] == np.frombuffer(submit.prompt, "<i4").tolist()

    @pytest.mark.slow
    async def test_long_text_leaves_the_loop_free(self, tmp_path, model_dir, monkeypatch):
        """
        A long text is tokenized in a thread, a short one in the event loop's own.
        """
        threads = []
        encode = TextModel.encode_text

        def recording(text_model: TextModel, text: str) -> list[int]:
            threads.append((len(text), threading.current_thread() is threading.main_thread()))
            return encode(text_model, text)

        monkeypatch.setattr(TextModel, "encode_text", recording)
        async with running_frontend(tmp_path) as frontend:
            await serve(frontend, model(model_dir, max_model_len=8192))
            for length in (2000, 2001):
                call = stub_of(frontend).Generate(pb.GenerateRequest(text="x" * length))
                await within(frontend.core.submits.get())
                call.cancel()
        assert [(2000, True), (2001, False)] == threads

    async def test_chat_is_rendered(self, frontend, stub):
        """
        A conversation becomes the prompt that the model's template writes, and its answer may fill
        the context.
        """
        messages = [{"role": "user", "content": "hi"}]
        call = stub.Generate(pb.GenerateRequest(chat={"messages": messages}))
        submit = await within(frontend.core.submits.get())
        call.cancel()
        expected = ids_of("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
        assert expected == np.frombuffer(submit.prompt, "<i4").tolist()
        assert (256 - len(expected), True) == (submit.max_tokens, submit.fills_context)

    @pytest.mark.parametrize(
        ("fields", "reason", "path"),
        [
            ({"token_ids": {"ids": [5, 600]}}, "INVALID_PARAMETER", "token_ids.ids[1]"),
            ({"token_ids": {"ids": [5] * 257}}, "PROMPT_TOO_LONG", "token_ids.ids"),
            ({"token_ids": {"ids": [5] * 256}}, "TOTAL_TOO_LONG", "stopping.max_tokens"),
            ({"text": "x" * 3_000_000}, "PROMPT_TOO_LONG", "text"),
            ({"text": ""}, "EMPTY_PROMPT", "text"),
            ({}, "EMPTY_PROMPT", "prompt"),
        ],
        ids=["id", "ids", "total", "huge", "empty", "none"],
    )
    async def test_unusable_prompt_is_refused_with_its_field(self, stub, fields, reason, path):
        """
        A prompt that can never run is INVALID_ARGUMENT with reason and field, and goes no further.
        """
        error = await error_of(stub.Generate(pb.GenerateRequest(**fields)))
        assert (reason, path, "INVALID_ARGUMENT") == (error.reason, error.field, error.code)


class TestRefusal:
    @pytest.mark.parametrize(
        ("refusal", "code", "retry_after_s"),
        [
            (QueueFull("max_num_seqs 4 is reached"), "RESOURCE_EXHAUSTED", 1.0),
            (DuplicateRequestId("'mine' is live"), "ALREADY_EXISTS", None),
            (NeverFits("needs 9 blocks", field="stopping.max_tokens"), "INVALID_ARGUMENT", None),
        ],
        ids=lambda value: getattr(value, "reason", None),
    )
    async def test_refusal_of_the_core_reaches_the_client(
        self, frontend, stub, refusal, code, retry_after_s
    ):
        """
        A refused request ends with the core's reason, sentence, field and retry advice.
        """
        call = stub.Generate(request())
        submit = await within(frontend.core.submits.get())
        await frontend.core.send(refused(submit.stream_id, refusal))
        error = await error_of(call)
        assert (refusal.reason, refusal.message, refusal.field, code, retry_after_s) == (
            error.reason,
            error.message,
            error.field,
            error.code,
            error.retry_after_s,
        )
        assert frontend.core.ends.empty()

    async def test_draining_service_takes_nothing(self, frontend, stub):
        """
        A draining service is UNAVAILABLE with retry advice, and the core is not asked.
        """
        await frontend.core.send(Availability(executor_attached=True, ready=False, draining=True))
        await until(lambda: frontend.client.availability.draining)
        error = await error_of(stub.Generate(request()))
        assert ("DRAINING", "UNAVAILABLE", 1.0) == (error.reason, error.code, error.retry_after_s)
        assert frontend.core.submits.empty()

    async def test_no_executor_yet_is_unavailable(self, tmp_path):
        """
        A request before any executor was attached gets NO_EXECUTOR with retry advice, and the
        reason why an executor that answers is not used.
        """
        async with running_frontend(tmp_path) as frontend:
            stub = stub_of(frontend)
            for call in (stub.Generate(request()), stub.GetModel(model_pb2.GetModelRequest())):
                error = await error_of(call)
                assert ("NO_EXECUTOR", 1.0) == (error.reason, error.retry_after_s)
            why = "block_size is set to 16, but the executor has 4"
            await frontend.core.send(
                Availability(executor_attached=False, ready=False, draining=False, refusal=why)
            )
            await until(lambda: frontend.client.availability.refusal)
            error = await error_of(stub.Generate(request()))
            assert why in error.message
            assert why == error.metadata["refusal"]

    async def test_unusable_tokenizer_is_told_to_every_request(self, tmp_path):
        """
        A model with an unusable tokenizer fails requests with the reason, not with a traceback.
        """
        (tmp_path / "tokenizer.json").write_text("{")
        async with running_frontend(tmp_path) as frontend:
            await serve(frontend, model(tmp_path))
            await until(lambda: frontend.client.availability.ready)
            error = await error_of(stub_of(frontend).Generate(request()))
        assert ("INVALID_MODEL", "FAILED_PRECONDITION") == (error.reason, error.code)

    async def test_tokenizer_with_more_ids_than_the_model_is_to_blame(self, tmp_path, model_dir):
        """
        A text that becomes an id outside the model's vocabulary is refused as the model's fault;
        other text is served.
        """
        vocab_size = max(ids_of("hello")) + 1
        outside = next(each for each in ("fox", "brown", "lazy") if max(ids_of(each)) >= vocab_size)
        async with running_frontend(tmp_path) as frontend:
            await serve(frontend, model(model_dir, vocab_size=vocab_size))
            stub = stub_of(frontend)
            for prompt in ({"text": outside}, {"chat": chat(outside)}):
                error = await error_of(stub.Generate(pb.GenerateRequest(**prompt)))
                assert "INVALID_MODEL" == error.reason
                assert f"vocabulary is 0 to {vocab_size - 1}" in error.message
            call = stub.Generate(pb.GenerateRequest(text="hello"))
            await within(frontend.core.submits.get())
            call.cancel()

    async def test_oversized_message_is_refused_and_service_goes_on(self, tmp_path, model_dir):
        """
        A message over the size limit is refused before it is decoded.
        """
        async with running_frontend(tmp_path, max_message_bytes=10_000) as frontend:
            await serve(frontend, model(model_dir))
            stub = stub_of(frontend)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await within(stub.Generate(pb.GenerateRequest(text="x" * 20_000)).read())
            assert grpc.StatusCode.RESOURCE_EXHAUSTED == caught.value.code()
            assert "small" == (await within(stub.GetModel(model_pb2.GetModelRequest()))).model.name


class TestModel:
    async def test_model_is_described(self, stub):
        """
        GetModel tells limits, ids and defaults of the served model.
        """
        answer = await within(stub.GetModel(model_pb2.GetModelRequest()))
        told = answer.model
        assert ("small", "rev-1", "LlamaForCausalLM", 512, 256, [EOS], "float32") == (
            told.name,
            told.revision,
            told.architecture,
            told.vocab_size,
            told.max_model_len,
            list(told.eos_token_ids),
            told.dtype,
        )
        defaults = told.default_sampling
        assert (0.75, 20, 0.5, 100) == (
            defaults.temperature,
            defaults.top_k,
            defaults.top_p,
            told.default_stopping.max_tokens,
        )
        assert not defaults.HasField("seed")
        assert told.capabilities == ModelCapabilities(
            text=True,
            chat=True,
            logprobs=True,
            prompt_logprobs=True,
            token_bytes=True,
            logprob_token_ids=True,
            allowed_token_ids=True,
            include_stop=True,
        )
        assert 0 < told.max_complete_bytes < 4 * 2**20 <= told.max_request_bytes

    async def test_other_model_serves_new_requests_only(self, tmp_path, frontend, stub):
        """
        A model that is attached later serves new requests, and running ones keep their own model's
        data.
        """
        running = stub.Generate(request())
        stream_id = await frontend.core.accept()
        other = model(tmp_path, name="other", revision="rev-2", vocab_size=10)
        await frontend.core.send(other)
        await frontend.core.send(Availability(executor_attached=True, ready=True, draining=False))
        answer = await within(stub.GetModel(model_pb2.GetModelRequest()))
        while answer.model.revision == "rev-1":  # the frontend has not got the other model yet
            answer = await within(stub.GetModel(model_pb2.GetModelRequest()))
        assert ("other", "rev-2", False, False) == (
            answer.model.name,
            answer.model.revision,
            answer.model.capabilities.chat,
            answer.model.capabilities.text,
        )
        error = await error_of(stub.Generate(pb.GenerateRequest(text="no tokenizer there")))
        assert ("INVALID_PARAMETER", "text") == (error.reason, error.field)
        told = {"logprobs": 1, "token_bytes": True}
        error = await error_of(
            stub.Generate(pb.GenerateRequest(token_ids={"ids": [5]}, response=told))
        )
        assert ("FEATURE_UNSUPPORTED", "response.token_bytes") == (error.reason, error.field)
        end = ended(stream_id, FinishReason.MAX_TOKENS, len(ids_of("the")))
        await frontend.core.tokens(stream_id, 0, ids_of("the"), end=end)
        messages = await rest_of(running)
        assert "rev-1" == messages[0].started.model_revision
        assert "the" == messages[1].delta.text


class TestAbort:
    async def test_abort_asks_the_core(self, frontend, stub):
        """
        Abort is answered by the core, and the aborted stream ends CANCELLED with its output.
        """
        asked: asyncio.Queue[bytes] = asyncio.Queue()
        frontend.core.answers["abort"] = lambda argument: asked.put_nowait(argument) or b"{}"
        call = stub.Generate(request(request_id="mine"))
        stream_id = await frontend.core.accept()
        await within(stub.Abort(pb.AbortRequest(request_id="mine")))
        assert b'{"request_id":"mine","tenant":""}' == await within(asked.get())
        end = ended(stream_id, FinishReason.CANCELLED, 1)
        await frontend.core.tokens(stream_id, 0, [70], end=end)
        messages = await rest_of(call)
        assert ["started", "delta", "finished", "done"] == kinds(messages)
        assert FinishReason.CANCELLED == messages[2].finished.reason

    async def test_unknown_id_is_not_found(self, frontend, stub):
        """
        An Abort of a request that is not live is NOT_FOUND.
        """
        frontend.core.answers["abort"] = lambda _: RequestNotFound("no live request 'x'")
        error = await error_of(stub.Abort(pb.AbortRequest(request_id="x")))
        assert ("REQUEST_NOT_FOUND", "NOT_FOUND") == (error.reason, error.code)

    async def test_empty_id_is_invalid(self, stub):
        """
        An Abort without an id is INVALID_PARAMETER.
        """
        error = await error_of(stub.Abort(pb.AbortRequest()))
        assert ("INVALID_PARAMETER", "request_id") == (error.reason, error.field)
