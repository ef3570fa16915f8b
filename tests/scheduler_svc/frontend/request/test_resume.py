"""Streams that go on after a break, over a real gRPC connection, the core played by the test."""

import numpy as np
import pytest

from scheduler_svc.core.request.request import FinishReason
from tandem.errors import Draining
from tandem.inference.v1 import inference_service_pb2 as pb
from tests.scheduler_svc.frontend.calls import error_of, kinds, rest_of, stub_of
from tests.scheduler_svc.frontend.fake_core import ended, model, running_frontend, serve, within
from tests.scheduler_svc.frontend.small_models import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
EOS = 1


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


HALVES = ids_of("n€")
"""Ids of which the last three are the bytes of one code point."""


def request(*choices: dict, **fields: object) -> pb.GenerateRequest:
    """Return a request that resumes with these choices."""
    values = {
        "token_ids": {"ids": [5, 6, 7]},
        "sampling": {"seed": 9},
        "resume": {"choices": choices},
    }
    return pb.GenerateRequest(**(values | fields))


def prior(choice: int, ids: list[int], *, finished: bool = False) -> dict:
    return {"choice": choice, "token_ids": ids, "finished": finished}


class TestGoingOn:
    async def test_stream_goes_on_after_what_the_client_has(self, frontend, stub):
        """
        A resumed stream gives the core the prior ids, tells their number in Started, continues
        offsets and text after them, and counts them as output.
        """
        had, new = ids_of("the quick"), ids_of(" fox")
        call = stub.Generate(request(prior(0, had)))
        submit = await within(frontend.core.submits.get())
        assert [had] == [np.frombuffer(raw, "<i4").tolist() for raw in submit.prior_outputs]
        assert ((), 9) == (submit.finished_choices, submit.sampling.seed)
        frontend.core.submits.put_nowait(submit)
        stream_id = await frontend.core.accept()
        end = ended(stream_id, FinishReason.EOS, len(had) + len(new) + 1, matched_token=EOS)
        await frontend.core.tokens(stream_id, len(had), [*new, EOS], end=end)
        started, delta, finished, done = await rest_of(call)
        assert (len(had), 3) == (started.started.resumed_tokens, started.started.prompt_tokens)
        assert (len(had), [*new, EOS], " fox") == (
            delta.delta.first_token_offset,
            list(delta.delta.token_ids),
            delta.delta.text,
        )
        assert FinishReason.EOS == finished.finished.reason
        assert (3, len(had) + len(new) + 1) == (
            done.done.usage.prompt_tokens,
            done.done.usage.output_tokens,
        )

    async def test_code_point_across_the_break_comes_whole(self, frontend, stub):
        """
        Ids that end in the middle of a code point leave its text to the id that completes it.
        """
        assert 4 == len(HALVES)
        call = stub.Generate(request(prior(0, HALVES[:-1])))
        stream_id = await frontend.core.accept()
        end = ended(stream_id, FinishReason.MAX_TOKENS, len(HALVES))
        await frontend.core.tokens(stream_id, len(HALVES) - 1, HALVES[-1:], end=end)
        (delta,) = [m.delta for m in await rest_of(call) if m.HasField("delta")]
        assert (len(HALVES) - 1, "€") == (delta.first_token_offset, delta.text)

    async def test_stop_string_across_the_break_ends_the_stream(self, frontend, stub):
        """
        A stop string that began in the prior ids is found.
        """
        had = ids_of("on")
        rest = ids_of("on fire")[len(had) :]
        call = stub.Generate(request(prior(0, had), stopping={"stop": ["n fire"]}))
        stream_id = await frontend.core.accept()
        await frontend.core.tokens(stream_id, len(had), rest)
        end = await within(frontend.core.ends.get())
        assert (FinishReason.STOP_STRING, len(had) + len(rest)) == (
            end.reason,
            end.num_output_tokens,
        )
        last = ended(stream_id, FinishReason.STOP_STRING, len(had) + len(rest))
        await frontend.core.tokens(stream_id, 0, [], end=last)
        messages = await rest_of(call)
        assert "" == "".join(m.delta.text for m in messages)
        (finished,) = [m.finished for m in messages if m.HasField("finished")]
        assert "n fire" == finished.stop_string

    async def test_finished_choice_is_not_told_again(self, frontend, stub):
        """
        A choice that had its Finished before the break gets no more messages, though usage counts
        its ids.
        """
        call = stub.Generate(
            request(prior(1, [70]), prior(0, [80, 81], finished=True), n=2, sampling={"seed": 1})
        )
        submit = await within(frontend.core.submits.get())
        assert ((0,), [8, 4]) == (submit.finished_choices, [len(p) for p in submit.prior_outputs])
        frontend.core.submits.put_nowait(submit)
        stream_id = await frontend.core.accept() + 1
        end = ended(stream_id, FinishReason.MAX_TOKENS, 3)
        await frontend.core.tokens(stream_id, 1, [71, 72], end=end)
        messages = await rest_of(call)
        assert ["started", "delta", "finished", "done"] == kinds(messages)
        assert (3, 1, 1, 5) == (
            messages[0].started.resumed_tokens,
            messages[1].delta.choice,
            messages[2].finished.choice,
            messages[3].done.usage.output_tokens,
        )
        assert frontend.core.ends.empty()

    async def test_long_output_is_taken_in_a_thread(self, tmp_path, model_dir):
        """
        Thousands of prior ids have the same effect as few.
        """
        async with running_frontend(tmp_path) as frontend:
            await serve(frontend, model(model_dir, max_model_len=8192))
            had = ids_of("the quick brown fox ") * 400
            stopping = {"max_tokens": len(had) + 9}
            call = stub_of(frontend).Generate(request(prior(0, had), stopping=stopping))
            stream_id = await frontend.core.accept()
            end = ended(stream_id, FinishReason.MAX_TOKENS, len(had) + 1)
            await frontend.core.tokens(stream_id, len(had), ids_of("the")[:1], end=end)
            messages = await rest_of(call)
            assert (len(had), len(had)) == (
                messages[0].started.resumed_tokens,
                messages[1].delta.first_token_offset,
            )


class TestEndedBefore:
    @pytest.mark.parametrize(
        ("ids", "stopping", "finished"),
        [
            ([70, EOS], {}, {"reason": "FINISH_REASON_EOS", "token_id": EOS}),
            (
                [70, 71],
                {"stop_token_ids": [71]},
                {"reason": "FINISH_REASON_STOP_TOKEN", "token_id": 71},
            ),
            ([70, 71], {"max_tokens": 2}, {"reason": "FINISH_REASON_MAX_TOKENS"}),
            (
                ids_of("it is on fire"),
                {"stop": ["on fire"]},
                {"reason": "FINISH_REASON_STOP_STRING", "stop_string": "on fire"},
            ),
            (
                HALVES[:-1],
                {"stop": ["n\ufffd"], "max_tokens": len(HALVES) - 1},
                {"reason": "FINISH_REASON_STOP_STRING", "stop_string": "n\ufffd"},
            ),
        ],
        ids=["eos", "token", "length", "string", "flushed"],
    )
    async def test_choice_that_ended_with_its_last_id_gets_its_end(
        self, frontend, stub, ids, stopping, finished
    ):
        """
        A stream that broke between its last Delta and its Finished gets the Finished, and no Delta
        twice.
        """
        call = stub.Generate(request(prior(0, ids), stopping=stopping))
        submit = await within(frontend.core.submits.get())
        assert (0,) == submit.finished_choices
        frontend.core.submits.put_nowait(submit)
        await frontend.core.accept()
        messages = await rest_of(call)
        assert ["started", "finished", "done"] == kinds(messages)
        expected = pb.GenerateResponse(finished={"choice": 0, **finished})
        assert expected == messages[1]
        assert (3, len(ids)) == (
            messages[2].done.usage.prompt_tokens,
            messages[2].done.usage.output_tokens,
        )
        assert frontend.core.ends.empty()


class TestRefusal:
    @pytest.mark.parametrize(
        ("message", "path", "text"),
        [
            (
                request(prior(0, [5]), sampling={}),
                "sampling.seed",
                (
                    "resume needs the seed that the stream ran with: "
                    "send Started.sampling as it came."
                ),
            ),
            (
                request(prior(1, [5])),
                "resume.choices[0].choice",
                "choice must be less than n, which is 1, got 1.",
            ),
            (
                request(prior(0, [5]), prior(0, [5])),
                "resume.choices[1].choice",
                "choice 0 is listed twice.",
            ),
            (
                request(prior(0, [5, 512])),
                "resume.choices[0].token_ids[1]",
                "token id 512 is not in the vocabulary, which is 0 to 511.",
            ),
            (
                request(prior(0, [5, 6, 7]), stopping={"max_tokens": 2}),
                "resume.choices[0].token_ids",
                "a choice can have at most max_tokens ids, which is 2, got 3.",
            ),
            (
                request(prior(0, [70, EOS, 71])),
                "resume.choices[0].token_ids[1]",
                "token id 1 ends the choice, but more ids follow it.",
            ),
            (
                request(prior(0, [70, 71, 72], finished=True), stopping={"stop_token_ids": [71]}),
                "resume.choices[0].token_ids[1]",
                "token id 71 ends the choice, but more ids follow it.",
            ),
            (
                request(prior(0, [*ids_of("fire"), 70]), stopping={"stop": ["fire"]}),
                f"resume.choices[0].token_ids[{len(ids_of('fire'))}]",
                "the text has the stop string 'fire', but more ids follow it.",
            ),
        ],
        ids=["seed", "choice", "twice", "id", "long", "eos", "stop-id", "stop-string"],
    )
    async def test_what_cannot_be_resumed_is_named(self, frontend, stub, message, path, text):
        """
        A resume that no stream of this request can have led to is INVALID_ARGUMENT with its field,
        and the core gets no submission.
        """
        error = await error_of(stub.Generate(message))
        assert ("INVALID_PARAMETER", "INVALID_ARGUMENT") == (error.reason, error.code)
        assert (path, text) == (error.field, error.message)
        assert frontend.core.submits.empty()

    async def test_greedy_needs_no_seed(self, frontend, stub):
        """
        A greedy request resumes without a seed, since it draws no random numbers.
        """
        call = stub.Generate(request(prior(0, [70]), sampling={"temperature": 0.0}))
        await within(frontend.core.submits.get())
        call.cancel()

    async def test_complete_does_not_resume(self, stub):
        """
        A Complete that resumes is refused, since it gives whole outputs.
        """
        error = await error_of(stub.Complete(pb.CompleteRequest(request=request(prior(0, [5])))))
        assert ("INVALID_PARAMETER", "request.resume") == (error.reason, error.field)


class TestFailure:
    async def test_failure_tells_what_was_sent(self, frontend, stub):
        """
        A stream that fails says how many ids of this call it had sent, beside the retry advice.
        """
        call = stub.Generate(request(prior(0, [70])))
        stream_id = await frontend.core.accept()
        await frontend.core.tokens(stream_id, 1, ids_of("the"), failure=Draining("bye"))
        error = await error_of(call)
        assert ("DRAINING", str(len(ids_of("the"))), 1.0) == (
            error.reason,
            error.metadata["tokens_emitted"],
            error.retry_after_s,
        )


class TestFingerprint:
    async def submitted(self, frontend, stub, message: pb.GenerateRequest):
        call = stub.Generate(message)
        submit = await within(frontend.core.submits.get())
        call.cancel()
        return submit

    async def test_repetition_has_the_same_fingerprint(self, frontend, stub):
        """
        Requests that differ in seed, id, priority, time limit or prior outputs have the same
        fingerprint; a given seed is marked.
        """
        first = await self.submitted(
            frontend, stub, pb.GenerateRequest(token_ids={"ids": [5]}, attempt_key="k")
        )
        again = await self.submitted(
            frontend,
            stub,
            request(
                prior(0, [70]),
                token_ids={"ids": [5]},
                attempt_key="k",
                request_id="mine",
                priority=3,
                time_limit_s=9,
            ),
        )
        assert first.fingerprint == again.fingerprint
        assert 32 == len(first.fingerprint)
        assert ("k", False, True) == (
            first.attempt_key,
            first.is_seed_given,
            again.is_seed_given,
        )

    async def test_output_to_the_contexts_end_is_the_same_however_far_it_is(
        self, frontend, stub, tmp_path, model_dir
    ):
        """
        A request without max_tokens has the same fingerprint if an executor's KV cache leaves it
        less.
        """
        long = {"token_ids": {"ids": [5] * 200}, "attempt_key": "k"}
        first = await self.submitted(frontend, stub, pb.GenerateRequest(**long))
        (tmp_path / "other").mkdir()
        async with running_frontend(tmp_path / "other") as other:
            await serve(other, model(model_dir, kv_tokens=240))
            after = await self.submitted(other, stub_of(other), pb.GenerateRequest(**long))
            asked = pb.GenerateRequest(**long, stopping={"max_tokens": 40})
            given = await self.submitted(other, stub_of(other), asked)
        assert (56, 40, 40) == (first.max_tokens, after.max_tokens, given.max_tokens)
        assert first.fingerprint == after.fingerprint == given.fingerprint

    @pytest.mark.parametrize(
        "changes",
        [
            {"token_ids": {"ids": [5, 6]}},
            {"sampling": {"temperature": 0.5}},
            {"stopping": {"max_tokens": 3}},
            {"stopping": {"stop": ["x"]}},
            {"stopping": {"ignore_eos": True}},
            {"n": 2},
            {"cache_salt": "s"},
        ],
        ids=lambda changes: next(iter(changes)),
    )
    async def test_other_prompt_or_params_have_another(self, frontend, stub, changes):
        """
        Any change that changes the tokens changes the fingerprint.
        """
        same = {"token_ids": {"ids": [5]}, "attempt_key": "k"}
        first = await self.submitted(frontend, stub, pb.GenerateRequest(**same))
        other = await self.submitted(frontend, stub, pb.GenerateRequest(**(same | changes)))
        assert first.fingerprint != other.fingerprint
