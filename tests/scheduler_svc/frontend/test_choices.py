"""Several choices of one prompt over a real gRPC connection, the core played by the test."""

import numpy as np
import pytest

from scheduler_svc.core.request.block_hashes import block_digests
from scheduler_svc.core.request.events import ProgressKind
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.frontend.stream.inbox import Received, StreamInbox
from scheduler_svc.ipc.messages import Accepted, StreamProgress
from tandem.errors import InvalidLogits, QueueFull, TandemError
from tandem.inference.v1 import inference_service_pb2 as pb
from tests.scheduler_svc.frontend.calls import error_of, kinds, rest_of, stub_of
from tests.scheduler_svc.frontend.fake_core import (
    ended,
    model,
    refused,
    running_frontend,
    serve,
    update,
    within,
)
from tests.scheduler_svc.frontend.small_models import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
EOS = 1


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def request(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(**({"token_ids": {"ids": [5, 6, 7]}, "n": 3} | fields))


def texts(messages: list[pb.GenerateResponse]) -> dict[int, str]:
    found: dict[int, str] = {}
    for message in messages:
        if message.HasField("delta"):
            found[message.delta.choice] = found.get(message.delta.choice, "") + message.delta.text
    return found


def finished(messages: list[pb.GenerateResponse]) -> dict[int, int]:
    found = [message.finished for message in messages if message.HasField("finished")]
    assert len({one.choice for one in found}) == len(found)
    return {one.choice: one.reason for one in found}


class TestChoices:
    async def test_choices_stream_side_by_side(self, frontend, stub):
        """
        Deltas of all choices come interleaved, with one Finished for each and one Done with usage
        of all.
        """
        call = stub.Generate(request())
        first = await frontend.core.accept()
        await within(call.read())
        words = [ids_of("the"), ids_of("quick"), ids_of("fox")]
        for choice, ids in enumerate(words):
            await frontend.core.tokens(first + choice, 0, ids)
        messages = [await within(call.read()) for _ in words]
        for choice, ids in reversed(list(enumerate(words))):
            end = ended(
                first + choice,
                FinishReason.EOS,
                len(ids) + 1,
                matched_token=EOS,
                num_cached_tokens=2 - choice,
                queue_s=0.25 + choice,
                first_token_s=0.75 - 0.25 * choice,
                total_s=1.5 + choice,
            )
            await frontend.core.tokens(first + choice, len(ids), [EOS], end=end)
        messages += await rest_of(call)
        assert {0: "the", 1: "quick", 2: "fox"} == texts(messages)
        assert dict.fromkeys(range(3), FinishReason.EOS) == finished(messages)
        done = messages[-1].done
        assert (3, 3 + sum(map(len, words)), 2) == (
            done.usage.prompt_tokens,
            done.usage.output_tokens,
            done.usage.cached_tokens,
        )
        assert (0.25, 0.25, 3.5, 3) == (
            done.timings.queue_s,
            done.timings.time_to_first_token_s,
            done.timings.total_s,
            done.timings.preemptions,
        )

    async def test_submission_says_how_many(self, frontend, stub):
        """
        One submission asks the core for all choices, and the next request's numbers follow theirs.
        """
        call = stub.Generate(request())
        submit = await within(frontend.core.submits.get())
        other = stub.Generate(request(n=1))
        following = await within(frontend.core.submits.get())
        assert (3, submit.stream_id + 3) == (submit.num_choices, following.stream_id)
        call.cancel()
        other.cancel()

    async def test_complete_returns_choices_in_order(self, frontend, stub):
        """
        Complete has one completion per choice, in order of their numbers, whichever ended first.
        """
        call = stub.Complete(pb.CompleteRequest(request=request(n=2)))
        first = await frontend.core.accept()
        for choice, word in ((1, "fox"), (0, "the")):
            ids = ids_of(word)
            end = ended(first + choice, FinishReason.MAX_TOKENS, len(ids))
            await frontend.core.tokens(first + choice, 0, ids, end=end)
        answer = await within(call)
        assert [(0, "the"), (1, "fox")] == [(one.choice, one.text) for one in answer.completions]
        assert 2 == answer.started.n

    async def test_stop_string_ends_only_its_choice(self, frontend, stub):
        """
        The core is told to end the choice in which the stop string came; the others go on.
        """
        call = stub.Generate(request(n=2, stopping={"stop": ["fox"]}))
        first = await frontend.core.accept()
        ids = ids_of("a fox")
        await frontend.core.tokens(first + 1, 0, ids)
        await frontend.core.tokens(first, 0, ids_of("the"))
        told = await within(frontend.core.ends.get())
        assert (first + 1, FinishReason.STOP_STRING) == (told.stream_id, told.reason)
        end = ended(first + 1, FinishReason.STOP_STRING, told.num_output_tokens)
        await frontend.core.tokens(first + 1, 0, [], end=end)
        count = len(ids_of("the"))
        await frontend.core.tokens(first, count, ids_of(" dog"))
        count += len(ids_of(" dog"))
        await frontend.core.tokens(
            first, count, [], end=ended(first, FinishReason.MAX_TOKENS, count)
        )
        messages = await rest_of(call)
        assert {0: "the dog", 1: "a "} == texts(messages)
        assert {0: FinishReason.MAX_TOKENS, 1: FinishReason.STOP_STRING} == finished(messages)
        assert frontend.core.ends.empty()

    async def test_client_gone_ends_every_choice_that_is_left(self, frontend, stub):
        """
        A cancelled call ends in the core the choices that have not ended yet, and no others.
        """
        call = stub.Generate(request())
        first = await frontend.core.accept()
        await within(call.read())
        end = ended(first + 1, FinishReason.MAX_TOKENS, 1)
        await frontend.core.tokens(first + 1, 0, [70], end=end)
        while (await within(call.read())).WhichOneof("event") != "finished":
            pass
        call.cancel()
        ends = [await within(frontend.core.ends.get()) for _ in range(2)]
        assert {(first, FinishReason.CANCELLED), (first + 2, FinishReason.CANCELLED)} == {
            (end.stream_id, end.reason) for end in ends
        }
        assert 0 == len(frontend.client.streams)

    async def test_choice_that_fails_ends_the_request(self, frontend, stub):
        """
        A choice that fails ends the call, since one stream has one status, and with it the other
        choices.
        """
        call = stub.Generate(request(n=2))
        first = await frontend.core.accept()
        await frontend.core.send(update(first + 1, 0, [], failure=InvalidLogits("NaN")))
        error = await error_of(call)
        assert "INVALID_LOGITS" == error.reason
        told = await within(frontend.core.ends.get())
        assert (first, FinishReason.CANCELLED) == (told.stream_id, told.reason)
        assert frontend.core.ends.empty()

    async def test_refusal_is_one_for_all(self, frontend, stub):
        """
        All choices are refused together, with the limit and when to try again, and none is ended.
        """
        call = stub.Generate(request())
        submit = await within(frontend.core.submits.get())
        limit = {"limit": "max_tenant_requests"}
        full = QueueFull("too many", retry_after_s=2.5, metadata=limit)
        await frontend.core.send(refused(submit.stream_id, full))
        error = await error_of(call)
        assert ("QUEUE_FULL", "RESOURCE_EXHAUSTED", 2.5, limit) == (
            error.reason,
            error.code,
            error.retry_after_s,
            error.metadata,
        )
        assert frontend.core.ends.empty()

    async def test_progress_is_of_the_first_choice_that_goes_on(self, frontend, stub):
        """
        Progress tells of choice 0 until it ends, then of the next.
        """
        call = stub.Generate(request(n=2))
        first = await frontend.core.accept()
        await within(call.read())
        scheduled = [StreamProgress(first + i, ProgressKind.SCHEDULED, 16 * i) for i in range(2)]
        await frontend.core.tokens(first + 1, 0, [], progress=scheduled[1])
        await frontend.core.tokens(first, 0, [], progress=scheduled[0])
        assert 0 == (await within(call.read())).progress.scheduled.cached_tokens
        end = ended(first, FinishReason.MAX_TOKENS, 1)
        await frontend.core.tokens(first, 0, [70], end=end)
        assert ["delta", "finished"] == kinds([await within(call.read()) for _ in range(2)])
        prefilled = StreamProgress(first + 1, ProgressKind.PREFILLED, 48)
        await frontend.core.tokens(first + 1, 0, [], progress=prefilled)
        assert 48 == (await within(call.read())).progress.prefilled.done_tokens
        call.cancel()

    async def test_tokens_lost_in_one_choice_are_an_error(self, frontend, stub):
        """
        A gap in any choice's offsets ends the call instead of delivering wrong text.
        """
        call = stub.Generate(request(n=2))
        first = await frontend.core.accept()
        await frontend.core.tokens(first + 1, 1, [70])
        error = await error_of(call)
        assert ("INTERNAL", "output token 0 was lost between core and frontend") == (
            error.reason,
            error.message,
        )


class TestSlowReader:
    def test_bound_is_over_all_choices(self):
        """
        Tokens that wait for the client count together, whichever choice they are of.
        """
        inbox = StreamInbox(1, before=[Received()] * 4, max_pending_bytes=4 * 100, now_s=0.0)
        for choice in inbox.choices:
            for offset in range(20):
                choice.put_tokens(offset, (70).to_bytes(4, "little"))
        assert 4 * 80 == inbox.num_pending_bytes
        assert [20] * 4 == [len(one.token_ids) for one in inbox.take().choices]
        assert 0 == inbox.num_pending_bytes


class TestSharing:
    @pytest.mark.slow
    async def test_submission_carries_what_requests_share_by(self, tmp_path, model_dir):
        """
        Priority, tenant and salt reach the core, and so do the digests of the prompt's full blocks.
        """
        async with running_frontend(tmp_path) as frontend:
            await serve(frontend, model(model_dir, block_size=4))
            prompt = list(range(5, 16))
            call = stub_of(frontend).Generate(
                pb.GenerateRequest(
                    token_ids={"ids": prompt}, priority=-3, tenant="alice", cache_salt="pepper"
                )
            )
            submit = await within(frontend.core.submits.get())
            call.cancel()
        assert (1, -3, "alice", b"pepper", 4) == (
            submit.num_choices,
            submit.priority,
            submit.tenant,
            submit.cache_salt,
            submit.digest_block_size,
        )
        digests = block_digests(np.array(prompt, np.int32), 4, b"pepper")
        assert (digests, 64) == (submit.block_digests, len(submit.block_digests))

    @pytest.mark.parametrize(("block_size", "num_tokens"), [(0, 50), (16, 15)])
    async def test_nothing_is_hashed_without_need(
        self, tmp_path, model_dir, block_size, num_tokens
    ):
        """
        A submission has no digests without prefix caching, or with less than a block.
        """
        async with running_frontend(tmp_path) as frontend:
            await serve(frontend, model(model_dir, block_size=block_size))
            call = stub_of(frontend).Generate(
                pb.GenerateRequest(token_ids={"ids": [5] * num_tokens})
            )
            submit = await within(frontend.core.submits.get())
            call.cancel()
        assert b"" == submit.block_digests

    async def test_long_prompts_are_hashed_in_a_thread(self, tmp_path, model_dir):
        """
        A long prompt, hashed in a thread, has the same digests as if hashed in the event loop.
        """
        async with running_frontend(tmp_path) as frontend:
            await serve(frontend, model(model_dir, block_size=16, max_model_len=10_000))
            call = stub_of(frontend).Generate(pb.GenerateRequest(token_ids={"ids": [7] * 5000}))
            submit = await within(frontend.core.submits.get())
            call.cancel()
        assert block_digests(np.full(5000, 7, np.int32), 16) == submit.block_digests


class TestTruncating:
    async def test_long_prompt_loses_its_beginning_and_says_so(self, tmp_path, model_dir):
        """
        A server that truncates gives the core the newest tokens, and Started tells how many are cut
        off.
        """
        async with running_frontend(tmp_path) as frontend:
            await serve(frontend, model(model_dir, max_model_len=32, truncates=True, block_size=8))
            prompt = [5 + i % 200 for i in range(100)]
            call = stub_of(frontend).Generate(
                pb.GenerateRequest(token_ids={"ids": prompt}, stopping={"max_tokens": 12})
            )
            submit = await within(frontend.core.submits.get())
            await frontend.core.send(Accepted(submit.stream_id))
            started = (await within(call.read())).started
            call.cancel()
        assert prompt[80:] == np.frombuffer(submit.prompt, "<i4").tolist()
        assert (20, 80, 12) == (
            started.prompt_tokens,
            started.truncated_prompt_tokens,
            started.stopping.max_tokens,
        )
        assert 2 * 32 == len(submit.block_digests)

    async def test_long_text_is_cut_too(self, tmp_path, model_dir):
        """
        A text's length is judged after tokenizing, unless the text is far too long to be worth
        that.
        """
        async with running_frontend(tmp_path) as frontend:
            await serve(frontend, model(model_dir, max_model_len=32, truncates=True))
            text = "the quick brown fox " * 10
            call = stub_of(frontend).Generate(
                pb.GenerateRequest(text=text, stopping={"max_tokens": 4})
            )
            submit = await within(frontend.core.submits.get())
            assert [0, *ids_of(text)][-28:] == np.frombuffer(submit.prompt, "<i4").tolist()
            call.cancel()
            error: TandemError = await error_of(
                stub_of(frontend).Generate(pb.GenerateRequest(text=text * 1000))
            )
            assert "PROMPT_TOO_LONG" == error.reason
