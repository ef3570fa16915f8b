"""Log probabilities follow their tokens to the client: released, held back and cut together."""

import pytest

from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.frontend.text.detokenizer import ByteDetokenizer, BytePiece
from scheduler_svc.frontend.text.output import OutputText
from scheduler_svc.frontend.text.stop_strings import StopMatcher
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.link.logprobs import TokenLogprob
from tests.scheduler_svc.frontend.calls import error_of, rest_of
from tests.scheduler_svc.frontend.fake_core import ended, logprobs_of, within
from tests.scheduler_svc.frontend.small_models import byte_level_tokenizer

EOS = 1
TOKENIZER = byte_level_tokenizer()
IDS = TOKENIZER.encode("one two three", add_special_tokens=False).ids
TOLD = [(-0.5 * place, [(place, -0.25), (9, -8.0)]) for place in range(len(IDS))]


def output_of(*pieces: bytes, stops: tuple[str, ...] = (), **options) -> OutputText:
    detokenizer = ByteDetokenizer({at: BytePiece.of(raw) for at, raw in enumerate(pieces)})
    return OutputText(detokenizer, stops=stops, end_token_ids=frozenset({99}), **options)


def released(output: OutputText, count: int) -> list[tuple[list[int], list[float]]]:
    """Return chunks of an output with token i and log probability -i in place i."""
    chunks = []
    for token_id in range(count):
        output.push(token_id, TokenLogprob(-float(token_id), [], []))
        chunks.append(output.take())
    chunks.append(output.finish())
    return [(c.token_ids, [one.logprob for one in c.logprobs]) for c in chunks if c is not None]


class TestRelease:
    def test_each_token_brings_its_own(self):
        """
        A token is released with its log probabilities.
        """
        assert [([0], [0.0]), ([1], [-1.0])] == released(output_of(b"a", b"b"), 2)

    def test_tokens_held_back_hold_theirs_back(self):
        """
        Tokens that share a code point are released together with both log probabilities.
        """
        assert [([0, 1], [0.0, -1.0]), ([2], [-2.0])] == released(
            output_of(b"\xe2", b"\x82\xac", b"c"), 3
        )

    def test_stop_string_cuts_them_with_the_tokens(self):
        """
        Tokens that a stop string cuts off have no log probabilities either.
        """
        output = output_of(b"a", b"ST", b"OP!", b"more", stops=("STOP",))
        assert [([0], [0.0]), ([1, 2], [-1.0, -2.0])] == released(output, 4)

    def test_tokens_sent_before_have_none(self):
        """
        An output that goes on after prior ids has log probabilities for the new ones only.
        """
        output = output_of(b"a", b"b", b"c")
        output.go_on_after([0, 1])
        output.push(2, TokenLogprob(-3.0, [], []))
        assert [-3.0] == [one.logprob for one in output.finish().logprobs]


class TestBytes:
    def told(self, output: OutputText, ids: list[int], top: list[int]) -> list[tuple]:
        """Return bytes of tokens and of the likeliest ids at each place."""
        for token_id in ids:
            output.push(token_id, TokenLogprob(-1.0, top, [-1.0] * len(top)))
        chunk = output.finish()
        assert len(chunk.token_ids) == len(chunk.token_bytes)
        return [tuple(one) for one in chunk.token_bytes]

    def test_each_token_and_alternative_has_its_own(self):
        """
        A character split over tokens is there in parts, beside what else could have been drawn.
        """
        output = output_of(b"\xe2", b"\x82\xac", b"c", tells_bytes=True)
        assert [(b"\xe2", [b"c"]), (b"\x82\xac", [b"c"])] == self.told(output, [0, 1], [2])

    def test_token_that_ends_the_output_has_none(self):
        """
        A token that ends the output has no text and no bytes, drawn or not.
        """
        output = output_of(b"a", tells_bytes=True)
        assert [(b"a", [b""]), (b"", [b""])] == self.told(output, [0, 99], [99])

    def test_stop_string_cuts_them_with_the_tokens(self):
        """
        Tokens that a stop string cuts off have no bytes; the one that completes it has all of its.
        """
        output = output_of(b"a", b"ST", b"OP!", b"more", stops=("STOP",), tells_bytes=True)
        assert [(b"a", []), (b"ST", []), (b"OP!", [])] == self.told(output, [0, 1, 2, 3], [])

    def test_they_go_on_after_what_was_sent(self):
        """
        A resumed output has bytes for the new tokens, as if it had never been broken.
        """
        output = output_of(b"\xe2", b"\x82\xac", b"c", tells_bytes=True)
        output.go_on_after([0])
        assert [(b"\x82\xac", [])] == self.told(output, [1], [])


class TestMinTokens:
    def test_early_stop_strings_are_passed_over(self):
        """
        A stop string that is complete within min_tokens stays in the text; a later one ends it.
        """
        pieces = [b"x", b"x", b"x", b"y"]
        output = output_of(*pieces, stops=("x",), min_tokens=2)
        for token_id in range(4):
            output.push(token_id)
        chunk = output.finish()
        assert ("xx", 3, "x") == (chunk.text, output.num_tokens, output.stopped.stop)

    def test_stop_string_that_ends_later_counts(self):
        """
        A stop string that begins within min_tokens and is complete after it ends the output.
        """
        output = output_of(b"aST", b"OP", stops=("STOP",), min_tokens=1)
        for token_id in range(2):
            output.push(token_id)
        assert ("a", "STOP") == (output.finish().text, output.stopped.stop)

    def test_match_passed_over_can_overlap_the_next(self):
        """
        A match that is passed over may contain the beginning of the match that counts.
        """
        matcher = StopMatcher(["aba"])
        assert matcher.feed("xaba", may_match=False) is None
        assert 1 == matcher.num_held_chars
        match = matcher.feed("ba")
        assert (3, 6) == (match.start, match.end)


class TestThroughTheFrontend:
    async def start(self, frontend, stub, **fields):
        fields = {"token_ids": {"ids": [5, 6, 7]}, "response": {"logprobs": 2}} | fields
        call = stub.Generate(pb.GenerateRequest(**fields))
        submit = await within(frontend.core.submits.get())
        return call, submit

    def told(self, messages) -> list[tuple[float, list[tuple[int, float]]]]:
        """Return the log probabilities of Deltas, which must have one entry per id."""
        found = []
        for message in messages:
            delta = message.delta
            assert len(delta.token_ids) == len(delta.logprobs)
            found += [
                (one.logprob, list(zip(one.top_token_ids, one.top_logprobs, strict=True)))
                for one in delta.logprobs
            ]
        return found

    @pytest.mark.parametrize("order", ["together", "before", "after"])
    async def test_every_token_arrives_with_its_own(self, frontend, stub, order):
        """
        Ids and log probabilities correspond in every Delta, whatever the order of the core's
        messages.
        """
        call, submit = await self.start(frontend, stub)
        core, stream, count = frontend.core, submit.stream_id, len(IDS)
        assert 2 == submit.sampling.logprobs
        await core.accept_of(submit)
        half = count // 2
        parts = [(0, half), (half, count)]
        if order == "together":
            for first, end in parts:
                told = logprobs_of(stream, first, TOLD[first:end])
                await core.tokens(stream, first, IDS[first:end], logprobs=(told,))
        elif order == "before":
            await core.tokens(stream, 0, [], logprobs=(logprobs_of(stream, 0, TOLD),))
            for first, end in parts:
                await core.tokens(stream, first, IDS[first:end])
        else:
            for first, end in parts:
                await core.tokens(stream, first, IDS[first:end])
            for first, end in parts:
                told = logprobs_of(stream, first, TOLD[first:end])
                await core.tokens(stream, count, [], logprobs=(told,))
        end = ended(stream, FinishReason.MAX_TOKENS, count)
        await core.tokens(stream, count, [], end=end)
        messages = await rest_of(call)
        ids = [token_id for message in messages for token_id in message.delta.token_ids]
        assert (IDS, TOLD) == (ids, self.told(messages))
        texts = [TOKENIZER.decode([token_id]) for token_id in IDS]
        assert texts == [one.text for message in messages for one in message.delta.logprobs]
        assert [
            [TOKENIZER.decode([top_id], skip_special_tokens=False) for top_id, _ in top]
            for _, top in TOLD
        ] == [list(one.top_texts) for message in messages for one in message.delta.logprobs]
        assert 2 == messages[0].started.response.logprobs

    async def test_repeated_entries_are_ignored(self, frontend, stub):
        """
        An entry that comes again after a merge counts once.
        """
        call, submit = await self.start(frontend, stub)
        stream = submit.stream_id
        await frontend.core.accept_of(submit)
        told = logprobs_of(stream, 0, TOLD)
        end = ended(stream, FinishReason.MAX_TOKENS, len(IDS))
        await frontend.core.tokens(stream, 0, IDS, logprobs=(told, told), end=end)
        assert self.told(await rest_of(call)) == TOLD

    @pytest.mark.parametrize("kept", [0, 1])
    async def test_lost_entries_fail_the_stream(self, frontend, stub, kept):
        """
        A token without its log probabilities is an internal error, and is not sent without them.
        """
        call, submit = await self.start(frontend, stub)
        stream = submit.stream_id
        await frontend.core.accept_of(submit)
        told = logprobs_of(stream, 0, TOLD[:kept])
        end = ended(stream, FinishReason.MAX_TOKENS, len(IDS))
        await frontend.core.tokens(stream, 0, IDS, logprobs=(told,), end=end)
        error = await error_of(call)
        assert "INTERNAL" == error.reason
        assert f"log probabilities of output token {kept} were lost" in error.message

    async def test_who_did_not_ask_is_told_nothing(self, frontend, stub):
        """
        A request without logprobs gets no Delta with log probabilities.
        """
        call = stub.Generate(pb.GenerateRequest(token_ids={"ids": [5]}))
        stream = await frontend.core.accept()
        end = ended(stream, FinishReason.MAX_TOKENS, len(IDS))
        await frontend.core.tokens(stream, 0, IDS, end=end)
        assert not any(message.delta.logprobs for message in await rest_of(call))

    async def test_bytes_are_told_where_they_are_asked_for(self, frontend, stub):
        """
        With token_bytes each token has its bytes, which make up the text, and so have the likeliest
        tokens; the last one is special and has none.
        """
        call, submit = await self.start(frontend, stub, response={"logprobs": 2, "token_bytes": 1})
        stream = submit.stream_id
        await frontend.core.accept_of(submit)
        end = ended(stream, FinishReason.MAX_TOKENS, len(IDS))
        told = logprobs_of(stream, 0, TOLD)
        await frontend.core.tokens(stream, 0, IDS, logprobs=(told,), end=end)
        entries = [one for message in await rest_of(call) for one in message.delta.logprobs]
        assert b"one two three" == b"".join(one.token_bytes for one in entries)
        assert [[TOKENIZER.decode([top_id]).encode() for top_id, _ in top] for _, top in TOLD] == [
            list(one.top_token_bytes) for one in entries
        ]

    async def test_complete_returns_them_whole(self, frontend, stub):
        """
        A Completion has one entry per id.
        """
        request = pb.GenerateRequest(token_ids={"ids": [5]}, response={"logprobs": 0})
        call = stub.Complete(pb.CompleteRequest(request=request))
        stream = await frontend.core.accept()
        told = logprobs_of(stream, 0, [(chosen, []) for chosen, _ in TOLD])
        end = ended(stream, FinishReason.MAX_TOKENS, len(IDS))
        await frontend.core.tokens(stream, 0, IDS, logprobs=(told,), end=end)
        completion = (await within(call)).completions[0]
        assert [chosen for chosen, _ in TOLD] == [one.logprob for one in completion.logprobs]
        assert len(completion.token_ids) == len(completion.logprobs)

    async def test_parameters_reach_the_core_and_come_back(self, frontend, stub):
        """
        Parameters of a request are submitted, and told in Started.
        """
        sampling = {
            "repetition_penalty": 1.5,
            "frequency_penalty": 0.25,
            "presence_penalty": -0.5,
            "min_p": 0.125,
            "logit_bias": {7: -2.0, 3: 4.0},
        }
        call, submit = await self.start(
            frontend, stub, sampling=sampling, stopping={"min_tokens": 4, "max_tokens": 9}
        )
        assert ((3, 4.0), (7, -2.0)) == submit.sampling.logit_bias
        assert (1.5, 0.25, -0.5, 0.125, 4) == (
            submit.sampling.repetition_penalty,
            submit.sampling.frequency_penalty,
            submit.sampling.presence_penalty,
            submit.sampling.min_p,
            submit.sampling.min_tokens,
        )
        await frontend.core.accept_of(submit)
        started = (await within(call.read())).started
        assert {7: -2.0, 3: 4.0} == dict(started.sampling.logit_bias)
        assert (1.5, 4) == (started.sampling.repetition_penalty, started.stopping.min_tokens)

    async def test_min_tokens_over_the_default_is_refused(self, frontend, stub):
        """
        A min_tokens over the default max_tokens is refused.
        """
        request = pb.GenerateRequest(token_ids={"ids": [5]}, stopping={"min_tokens": 101})
        error = await error_of(stub.Generate(request))
        assert "stopping.min_tokens" == error.field
