"""Options of the response, models and questions about tokens, over a real gRPC connection."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.frontend.stream import whole
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.inference.v1 import model_pb2, tokens_pb2
from tests.scheduler_svc.frontend.calls import error_of, kinds, rest_of, stub_of
from tests.scheduler_svc.frontend.fake_core import ended, model, running_frontend, serve, within
from tests.scheduler_svc.frontend.small_models import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
IDS = TOKENIZER.encode("the fox", add_special_tokens=False).ids


def request(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(**({"token_ids": {"ids": [5, 6, 7]}} | fields))


async def served(frontend, stub, sent: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """Return the messages of a request whose output is `IDS`."""
    call = stub.Generate(sent)
    stream = await frontend.core.accept()
    await frontend.core.tokens(stream, 0, IDS, end=ended(stream, FinishReason.MAX_TOKENS, len(IDS)))
    return await rest_of(call)


class TestWhatIsTold:
    @pytest.mark.parametrize(
        ("response", "told"),
        [
            ({}, (IDS, "the fox")),
            ({"omit_text": True}, (IDS, "")),
            ({"omit_token_ids": True}, ([], "the fox")),
        ],
    )
    async def test_text_or_ids_are_left_out(self, frontend, stub, response, told):
        """
        A client that needs only text, or only ids, is not sent the other; Started repeats it.
        """
        started, delta, finished, done = await served(frontend, stub, request(response=response))
        assert told == (list(delta.delta.token_ids), delta.delta.text)
        assert pb.GenerateRequest(response=response).response == started.started.response
        assert ("finished", len(IDS)) == (
            finished.WhichOneof("event"),
            done.done.usage.output_tokens,
        )

    async def test_output_in_an_interval_is_merged(self, frontend, stub):
        """
        Tokens that come before min_delta_interval_s has passed wait for one Delta, and the end
        does not wait for it.
        """
        sent = request(response={"min_delta_interval_s": 10.0})
        call = stub.Generate(sent)
        stream = await frontend.core.accept()
        await frontend.core.tokens(stream, 0, IDS[:1])
        messages = [await within(call.read()), await within(call.read())]
        for at in range(1, len(IDS)):
            await frontend.core.tokens(stream, at, IDS[at : at + 1])
        end = ended(stream, FinishReason.MAX_TOKENS, len(IDS))
        await frontend.core.tokens(stream, len(IDS), [], end=end)
        messages += await rest_of(call)
        assert ["started", "delta", "delta", "finished", "done"] == kinds(messages)
        assert IDS[1:] == list(messages[2].delta.token_ids)

    @pytest.mark.parametrize(
        ("fields", "reason", "path"),
        [
            (
                {"response": {"prompt_logprobs": 21}},
                "INVALID_PARAMETER",
                "response.prompt_logprobs",
            ),
            ({"response": {"token_bytes": True}}, "INVALID_PARAMETER", "response.token_bytes"),
            ({"response": {"parse_output": True}}, "FEATURE_UNSUPPORTED", "response.parse_output"),
            (
                {"response": {"logprob_token_ids": [1]}},
                "INVALID_PARAMETER",
                "response.logprob_token_ids",
            ),
            (
                {"response": {"logprobs": 0, "logprob_token_ids": [1] * 65}},
                "INVALID_PARAMETER",
                "response.logprob_token_ids",
            ),
            (
                {"response": {"logprobs": 0, "logprob_token_ids": [1, 512]}},
                "INVALID_PARAMETER",
                "response.logprob_token_ids[1]",
            ),
            ({"structured_output": {"regex": "a"}}, "FEATURE_UNSUPPORTED", "structured_output"),
            (
                {"response": {"min_delta_interval_s": 10.5}},
                "INVALID_PARAMETER",
                "response.min_delta_interval_s",
            ),
            (
                {"response": {"min_delta_interval_s": float("nan")}},
                "INVALID_PARAMETER",
                "response.min_delta_interval_s",
            ),
        ],
    )
    async def test_unsupported_option_is_refused(self, stub, fields, reason, path):
        """
        An option that the capabilities exclude is refused, never left out in silence.
        """
        error = await error_of(stub.Generate(request(**fields)))
        assert (reason, path) == (error.reason, error.field)

    async def test_option_that_is_switched_off_is_no_demand(self, frontend, stub):
        """
        A false token_bytes asks for nothing, so it needs nothing.
        """
        messages = await served(frontend, stub, request(response={"token_bytes": False}))
        assert "done" == messages[-1].WhichOneof("event")

    async def test_answer_beyond_the_bound_of_complete_is_refused(
        self, frontend, stub, monkeypatch
    ):
        """
        A whole answer over the bound is RESPONSE_TOO_LARGE, and the core is told to end it.
        """
        monkeypatch.setattr(whole, "MAX_COMPLETE_BYTES", 20)
        call = stub.Complete(pb.CompleteRequest(request=request()))
        stream = await frontend.core.accept()
        await frontend.core.tokens(stream, 0, IDS * 3)
        error = await error_of(call)
        assert ("RESPONSE_TOO_LARGE", "FAILED_PRECONDITION", "20") == (
            error.reason,
            error.code,
            error.metadata["limit_bytes"],
        )
        ended_stream = await within(frontend.core.ends.get())
        assert (stream, FinishReason.CANCELLED) == (ended_stream.stream_id, ended_stream.reason)


class TestErrorsAreFound:
    async def test_error_has_the_id_of_the_request(self, stub):
        """
        RequestInfo has the client's id, or the one that the server chose, which is in its log.
        """
        bad = {"sampling": {"temperature": 9}}
        named = await error_of(stub.Generate(request(request_id="mine", **bad)))
        chosen = await error_of(stub.Complete(pb.CompleteRequest(request=request(**bad))))
        assert ("mine", 24) == (named.request_id, len(chosen.request_id))

    async def test_id_that_no_request_can_have_is_not_repeated(self, stub):
        """
        An id that breaks the rules is refused under an id of the server's.
        """
        error = await error_of(stub.Generate(request(request_id="x" * 500)))
        assert ("request_id", 24) == (error.field, len(error.request_id))

    async def test_details_have_the_standard_messages(self, stub):
        """
        Any language finds ErrorInfo, BadRequest and RequestInfo among the details.
        """
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await within(stub.GetModel(model_pb2.GetModelRequest(model="other")))
        status = rpc_status.from_call(caught.value)
        names = {detail.TypeName() for detail in status.details}
        expected = {
            message.DESCRIPTOR.full_name
            for message in (
                error_details_pb2.ErrorInfo,
                error_details_pb2.BadRequest,
                error_details_pb2.RequestInfo,
            )
        }
        assert expected == names


class TestWaiting:
    async def test_deadline_and_limit_of_the_queue_reach_the_core(self, frontend, stub):
        """
        The core hears how long the request may wait, and when its caller gives up.
        """
        call = stub.Generate(request(queue_limit_s=2.5), timeout=60)
        submit = await within(frontend.core.submits.get())
        call.cancel()
        assert 2.5 == submit.queue_limit_s
        assert 59 < submit.give_up_s - submit.arrival_s < 61  # gRPC rounds it up
        call = stub.Generate(request())
        submit = await within(frontend.core.submits.get())
        call.cancel()
        assert (None, None) == (submit.queue_limit_s, submit.give_up_s)


class TestModels:
    async def test_all_models_are_listed(self, stub):
        """
        ListModels has the one model that is served, as GetModel describes it, on its only page.
        """
        listed = await within(stub.ListModels(model_pb2.ListModelsRequest()))
        one = await within(stub.GetModel(model_pb2.GetModelRequest(model="small")))
        assert ([one.model], "") == (list(listed.models), listed.next_page_token)

    @pytest.mark.parametrize(
        ("fields", "path"),
        [
            ({"page_size": 0}, "page_size"),
            ({"page_size": 1001}, "page_size"),
            ({"page_token": "x"}, "page_token"),
        ],
    )
    async def test_page_that_is_not_there_is_refused(self, stub, fields, path):
        """
        A page size out of range and a token of no page are INVALID_PARAMETER.
        """
        error = await error_of(stub.ListModels(model_pb2.ListModelsRequest(**fields)))
        assert ("INVALID_PARAMETER", path) == (error.reason, error.field)

    async def test_request_for_another_model_is_not_served(self, stub):
        """
        A request that names a model gets that model or MODEL_NOT_FOUND, which names one that is.
        """
        error = await error_of(stub.Generate(request(model="other")))
        assert ("MODEL_NOT_FOUND", "NOT_FOUND", "model", "small") == (
            error.reason,
            error.code,
            error.field,
            error.metadata["served"],
        )

    async def test_request_for_the_served_model_is_served(self, frontend, stub):
        """
        Started tells the model's name.
        """
        started, *_ = await served(frontend, stub, request(model="small"))
        assert "small" == started.started.model


class TestTokens:
    async def test_ids_are_those_of_a_request(self, frontend, stub):
        """
        Tokenize gives the ids that Generate runs with.
        """
        for prompt in (
            {"text": "hello"},
            {"chat": {"messages": [{"role": "user", "content": "x"}]}},
        ):
            told = await within(
                stub.Tokenize(tokens_pb2.TokenizeRequest(**prompt, with_texts=True))
            )
            call = stub.Generate(pb.GenerateRequest(**prompt))
            submit = await within(frontend.core.submits.get())
            call.cancel()
            assert [int(one) for one in memoryview(submit.prompt).cast("i")] == list(told.token_ids)
            assert len(told.token_ids) == len(told.token_texts)
            assert 256 == told.max_model_len

    async def test_special_tokens_are_parsed_on_demand(self, stub):
        """
        The name of a special token is text, unless parse_special_tokens is set.
        """
        special = TOKENIZER.id_to_token(1)
        plain = await within(stub.Tokenize(tokens_pb2.TokenizeRequest(text=special)))
        parsed = await within(
            stub.Tokenize(tokens_pb2.TokenizeRequest(text=special, parse_special_tokens=True))
        )
        assert [1] == list(parsed.token_ids)
        assert 1 not in list(plain.token_ids)

    async def test_text_of_ids_is_told(self, stub):
        """
        Detokenize writes special tokens only where it is asked to.
        """
        ids = [*IDS, 1]
        plain = await within(stub.Detokenize(tokens_pb2.DetokenizeRequest(token_ids=ids)))
        kept = await within(
            stub.Detokenize(tokens_pb2.DetokenizeRequest(token_ids=ids, keep_special_tokens=True))
        )
        assert ("the fox", f"the fox{TOKENIZER.id_to_token(1)}") == (plain.text, kept.text)

    @pytest.mark.parametrize(
        ("call", "reason", "path"),
        [
            (lambda stub: stub.Tokenize(tokens_pb2.TokenizeRequest()), "EMPTY_PROMPT", "prompt"),
            (
                lambda stub: stub.Detokenize(tokens_pb2.DetokenizeRequest(token_ids=[512])),
                "INVALID_PARAMETER",
                "token_ids[0]",
            ),
            (
                lambda stub: stub.Detokenize(tokens_pb2.DetokenizeRequest(token_ids=[1] * 257)),
                "PROMPT_TOO_LONG",
                "token_ids",
            ),
        ],
    )
    async def test_bad_question_is_refused(self, stub, call, reason, path):
        """
        No prompt, an id outside the vocabulary and too many ids are refused.
        """
        error = await error_of(call(stub))
        assert (reason, path) == (error.reason, error.field)


async def test_seed_of_the_server_survives_json(tmp_path, model_dir):
    """
    Seeds that the server chooses are below 2^53, so that JavaScript and JSON keep them.
    """
    async with running_frontend(tmp_path) as frontend:
        await serve(frontend, model(model_dir))
        calls = [stub_of(frontend).Generate(request()) for _ in range(64)]
        submits = [await within(frontend.core.submits.get()) for _ in calls]
        for call in calls:
            call.cancel()
        assert all(submit.sampling.seed < 2**53 for submit in submits)
        assert len({submit.sampling.seed for submit in submits}) == len(calls)
        await asyncio.sleep(0)


async def test_prompts_that_cannot_be_scored_are_no_capability(tmp_path, model_dir):
    """
    A server that materializes the logits of last tokens only says so in the capabilities.
    """
    async with running_frontend(tmp_path, scores_prompts=False) as frontend:
        await serve(frontend, model(model_dir))
        answer = await within(stub_of(frontend).GetModel(model_pb2.GetModelRequest()))
    assert not answer.model.capabilities.prompt_logprobs
    assert answer.model.capabilities.logprobs
