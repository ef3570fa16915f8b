"""Uses of an embedded engine besides tokens: chats, streams, stop strings, choices."""

from __future__ import annotations

import threading

import pytest

from tandem.engine_config import EngineConfig
from tandem_embedded import (
    ConfigError,
    CoreOptions,
    ExecutionError,
    FinishReason,
    GenerationParams,
    HuggingFaceTokenizer,
    SchedulerError,
    SimpleTokenizer,
    TextStream,
    ValidationError,
)
from tests.clients.embedded.fake_backend import VOCAB_SIZE, engine_and_runner
from tests.scheduler_svc.core.fake_executor import expected_outputs
from tests.scheduler_svc.frontend.small_models import byte_level_tokenizer, save_model

SIMPLE = SimpleTokenizer()


def engine_that_says(text: str, **settings):
    """Return an engine that produces this text for every request."""
    engine, runner = engine_and_runner(**settings)
    runner.script(SIMPLE.encode(text)[1:])
    return engine


class _Oversized(SimpleTokenizer):
    """Tokenizer that writes texts and conversations with an id that the model lacks."""

    def encode(self, text):
        return [0, VOCAB_SIZE]

    def encode_chat(self, messages, *, max_prompt_len):
        return [VOCAB_SIZE]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A byte-level tokenizer with a chat template."""
    return HuggingFaceTokenizer(save_model(tmp_path_factory.mktemp("chat")))


class TestStopStrings:
    @pytest.mark.parametrize("window", [1, 2, 4])
    @pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
    def test_an_output_ends_before_the_first_stop_string(self, window, is_streamed):
        """
        The text goes up to the stop string, the tokens up to the one that completed it, and what
        was computed beyond is dropped, however far steps are planned ahead.
        """
        engine = engine_that_says("abcdefghij", window=window)
        params = GenerationParams(max_tokens=10, stop=("fx", "de"))
        if is_streamed:
            stream = engine.stream([5], params)
            assert "abc" == "".join(piece.text for piece in stream)
            done = stream.wait()
        else:
            done = engine.complete([5], params)
        assert "abc" == done.output_text
        assert SIMPLE.encode("abcde")[1:] == done.output_tokens
        assert (FinishReason.STOP_STRING, "de") == (done.finish_reason, done.stop_string)
        assert [] == engine.run()
        assert 0 == engine.get_memory_stats().used_blocks
        engine.check_integrity()

    def test_the_beginning_of_a_stop_string_is_held_back(self):
        """
        Text that may become a stop string is told once it has not, and never if it does.
        """
        engine = engine_that_says("ab12cd123")
        with engine.stream([5], GenerationParams(max_tokens=9, stop=("123",))) as stream:
            assert ["a", "b", "12c", "d", ""] == [piece.text for piece in stream]

    def test_no_stop_string_ends_an_output_before_min_tokens(self):
        """
        A stop string that is complete within min_tokens is passed over.
        """
        engine = engine_that_says("ababab")
        done = engine.complete([5], GenerationParams(max_tokens=6, stop=("ab",), min_tokens=3))
        assert "ab" == done.output_text

    def test_stop_strings_need_a_tokenizer(self):
        """
        Stop strings are refused where there is no text to find them in.
        """
        engine, _ = engine_and_runner(tokenizer=None)
        with pytest.raises(ValidationError, match="stop strings need text"):
            engine.submit_request([5], GenerationParams(stop=("a",)))


class TestStreams:
    def test_pieces_come_before_the_end(self):
        """
        The first piece is there while the request still runs.
        """
        engine = engine_that_says("abcdef")
        stream = engine.stream([5], GenerationParams(max_tokens=6))
        assert ("a", 0) == (next(stream).text, next(stream).choice)
        assert stream.result is None
        assert "cdef" == "".join(piece.text for piece in stream)
        assert "abcdef" == stream.wait().output_text

    def test_results_of_others_are_not_lost(self):
        """
        Requests that complete while a stream is read come with the next run, and the stream's own
        result does not.
        """
        engine, _ = engine_and_runner()
        other = engine.submit_request("abc", GenerationParams(max_tokens=2))
        list(engine.stream("abcd", GenerationParams(max_tokens=8)))
        assert [other] == [done.request_id for done in engine.run()]

    def test_a_stream_that_is_left_aborts_its_request(self):
        """
        Leaving the with block gives the request's blocks back.
        """
        engine, _ = engine_and_runner()
        with engine.stream("abc", GenerationParams(max_tokens=50)) as stream:
            next(stream)
        assert stream.result is not None
        assert FinishReason.CANCELLED == stream.result.finish_reason
        assert [] == engine.run()
        assert 0 == engine.get_memory_stats().used_blocks

    def test_a_request_that_fails_raises_where_its_text_ends(self):
        """
        Output of a failing request is told before the error is raised; `complete` returns the
        error.
        """
        engine, runner = engine_and_runner()
        stream = engine.stream("abc", GenerationParams(max_tokens=8))
        next(stream)
        runner.executor.poisoned.add((0, 1))
        with pytest.raises(ExecutionError):
            list(stream)
        assert not stream.wait().success

    def test_threads_can_read_a_stream_each(self):
        """
        Streams of several threads have the texts that they have alone.
        """
        engine, _ = engine_and_runner()
        texts: dict[int, str] = {}

        def read(number: int, stream: TextStream) -> None:
            texts[number] = "".join(piece.text for piece in stream)

        params = GenerationParams(max_tokens=12)
        streams = [engine.stream([number + 4], params) for number in range(4)]
        threads = [threading.Thread(target=read, args=pair) for pair in enumerate(streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        alone, _ = engine_and_runner()
        wanted = [alone.complete([number + 4], params).output_text for number in range(4)]
        assert wanted == [texts[number] for number in range(4)]


class TestChoices:
    @pytest.mark.parametrize("window", [1, 2])
    def test_a_request_has_as_many_choices_as_asked_for(self, window):
        """
        Each choice draws its own tokens of one prompt, and all come together, once.
        """
        engine, _ = engine_and_runner(window=window)
        first = engine.submit_request([5, 6], GenerationParams(max_tokens=8, n=3))
        second = engine.submit_request([5, 6], GenerationParams(max_tokens=8))
        completed = {done.request_id: done for done in engine.run()}
        assert {first, second} == completed.keys()
        wanted = [expected_outputs([5, 6], 8, frozenset(), VOCAB_SIZE, at) for at in range(3)]
        assert wanted == [choice.output_tokens for choice in completed[first].choices]
        assert wanted[0] == completed[first].output_tokens == completed[second].output_tokens
        assert 24 == completed[first].generated_tokens

    def test_choices_that_end_apart_are_told_as_they_come(self):
        """
        A stream names the choice of each piece, and ends with the last choice.
        """
        engine, _ = engine_and_runner()
        ends = expected_outputs([5, 6], 8, frozenset(), VOCAB_SIZE, 1)[2]
        params = GenerationParams(max_tokens=8, n=2, stop_token_ids=(ends,))
        stream = engine.stream([5, 6], params)
        told: dict[int, list[int]] = {0: [], 1: []}
        for piece in stream:
            told[piece.choice] += piece.token_ids
        done = stream.wait()
        assert [told[0], told[1]] == [choice.output_tokens for choice in done.choices]
        assert 3 == len(told[1])
        assert FinishReason.STOP_TOKEN == done.choices[1].finish_reason

    def test_an_abort_ends_all_choices(self):
        """
        All choices of an aborted request are CANCELLED.
        """
        engine, _ = engine_and_runner()
        request_id = engine.submit_request([5], GenerationParams(max_tokens=8, n=2))
        engine.step()
        engine.abort(request_id)
        (done,) = engine.run()
        assert [FinishReason.CANCELLED] * 2 == [choice.finish_reason for choice in done.choices]


class TestChats:
    def test_a_chat_is_written_by_the_models_template(self, tokenizer):
        """
        A conversation's prompt is what the chat template makes of it.
        """
        engine, _ = engine_and_runner(tokenizer=tokenizer)
        request_id = engine.submit_chat([{"role": "user", "content": "the"}])
        written = "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n"
        wanted = byte_level_tokenizer().encode(written, add_special_tokens=False).ids
        assert wanted == engine.get_request(request_id).input_tokens

    def test_an_answer_may_fill_the_context(self, tokenizer):
        """
        Without max_tokens an answer goes on until the context ends, and says so.
        """
        config = EngineConfig(block_size=4, max_num_blocks=100, max_model_len=300)
        engine, _ = engine_and_runner(config, tokenizer=tokenizer)
        done = engine.complete(messages=[{"role": "user", "content": "the"}])
        assert 300 == done.num_prompt_tokens + done.generated_tokens
        assert FinishReason.CONTEXT_LIMIT == done.finish_reason

    def test_a_prompt_gets_what_fits_of_its_default(self):
        """
        The default of 100 tokens gives way to the context, as a server's does.
        """
        engine, _ = engine_and_runner()
        done = engine.complete([5] * 100)
        assert (28, FinishReason.CONTEXT_LIMIT) == (done.generated_tokens, done.finish_reason)

    @pytest.mark.parametrize(
        ("messages", "text"),
        [
            ([], "at least one message"),
            ([{"role": "user"}], r"messages\[0\] must have"),
            ([{"role": "", "content": "x"}], r"messages\[0\] must have"),
            (["hello"], r"messages\[0\] must have"),
        ],
        ids=["none", "no-content", "no-role", "text"],
    )
    def test_a_wrong_conversation_is_refused(self, tokenizer, messages, text):
        """
        The error names what is wrong with a conversation.
        """
        engine, _ = engine_and_runner(tokenizer=tokenizer)
        with pytest.raises(ValidationError, match=text):
            engine.submit_chat(messages)

    @pytest.mark.parametrize(
        "prompt",
        [{"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}],
        ids=["text", "chat"],
    )
    def test_tokenizer_with_more_ids_than_the_model_is_to_blame(self, prompt):
        """
        Text that becomes an id outside the model's vocabulary is the model's fault, as in a
        service, and not the request's.
        """
        engine, _ = engine_and_runner(tokenizer=_Oversized())
        with pytest.raises(ConfigError) as caught:
            engine.complete(**prompt)
        assert "INVALID_MODEL" == caught.value.reason
        assert (
            f"the tokenizer makes token id {VOCAB_SIZE} of this prompt, but the model's vocabulary "
            f"is 0 to {VOCAB_SIZE - 1}: the two do not belong together"
        ) == caught.value.message

    @pytest.mark.parametrize("token_id", [VOCAB_SIZE, -1, 10**30], ids=["next", "negative", "huge"])
    def test_id_outside_the_vocabulary_is_named_by_its_place(self, token_id):
        """
        The first of a caller's own ids that the model lacks is named, in a service's words.
        """
        engine, _ = engine_and_runner()
        with pytest.raises(ValidationError) as caught:
            engine.submit_request([0, token_id, -7])
        assert ("INVALID_PARAMETER", "prompt[1]") == (caught.value.reason, caught.value.field)
        assert (
            f"token id {token_id} is not in the vocabulary, which is 0 to {VOCAB_SIZE - 1}."
            == caught.value.message
        )

    def test_a_tokenizer_without_template_is_named(self):
        """
        A conversation needs a chat template.
        """
        engine, _ = engine_and_runner()
        with pytest.raises(ValidationError, match="no chat template"):
            engine.submit_chat([{"role": "user", "content": "x"}])

    @pytest.mark.parametrize("given", [{}, {"prompt": "x", "messages": [{}]}], ids=["none", "both"])
    def test_either_a_prompt_or_messages(self, given):
        """
        A completion takes either a prompt or messages, and not both.
        """
        engine, _ = engine_and_runner()
        with pytest.raises(ValidationError, match="either a prompt or messages"):
            engine.complete(**given)


class TestOrder:
    ONE = EngineConfig(block_size=4, max_num_blocks=64, max_batch_size=1, max_model_len=128)

    def test_lower_priorities_go_first(self):
        """
        The waiting request with the lowest priority value is served next.
        """
        engine, _ = engine_and_runner(self.ONE)
        for priority in (3, -1, 2):
            engine.submit_request([5], GenerationParams(max_tokens=3, priority=priority))
        assert [1, 2, 0] == [done.request_id for done in engine.run()]

    def test_ageing_lifts_those_that_waited(self):
        """
        A request that has waited for as many periods of ageing_s as its priority is worse goes
        ahead of a newer one.
        """
        now = [0.0]
        options = CoreOptions(ageing_s=1.0)
        engine, _ = engine_and_runner(self.ONE, options=options, clock=lambda: now[0])
        engine.submit_request([5], GenerationParams(max_tokens=3, priority=5))
        now[0] = 6.0
        engine.submit_request([6], GenerationParams(max_tokens=3, priority=0))
        assert [0, 1] == [done.request_id for done in engine.run()]

    @pytest.mark.parametrize(("preempts", "order"), [(True, [1, 0]), (False, [0, 1])])
    def test_a_better_priority_may_take_the_place_of_a_running_request(self, preempts, order):
        """
        Under priority_preemption a request that runs gives way to a better one that waits.
        """
        options = CoreOptions(priority_preemption=preempts)
        engine, _ = engine_and_runner(self.ONE, options=options)
        engine.submit_request([5], GenerationParams(max_tokens=20, priority=5))
        engine.step()
        engine.submit_request([6], GenerationParams(max_tokens=3, priority=0))
        assert order == [done.request_id for done in engine.run()]

    def test_a_tenant_has_at_most_so_many_requests(self):
        """
        A tenant over max_tenant_requests is refused; others, and requests without tenant, are not.
        """
        engine, _ = engine_and_runner(options=CoreOptions(max_tenant_requests=1))
        mine = GenerationParams(max_tokens=3, tenant="me")
        engine.submit_request([5], mine)
        with pytest.raises(SchedulerError, match="max_tenant_requests"):
            engine.submit_request([5], mine)
        engine.submit_request([5], GenerationParams(max_tokens=3, tenant="you"))
        engine.submit_request([5], GenerationParams(max_tokens=3))
        assert 3 == len(engine.run())
        engine.submit_request([5], mine)

    def test_salts_keep_kv_apart(self):
        """
        Equal prompts under different salts share nothing.
        """
        engine, _ = engine_and_runner()
        prompt = [5 + at for at in range(16)]
        cached = [
            engine.complete(
                prompt, GenerationParams(max_tokens=2, cache_salt=salt)
            ).num_cached_tokens
            for salt in ("a", "b", "a")
        ]
        assert [0, 0, 15] == cached


class TestEvents:
    def test_what_happened_to_a_request_can_be_asked_for(self):
        """
        With track_token_events every token is an event, of live requests and those just over.
        """
        options = CoreOptions(track_request_events=True, track_token_events=True)
        engine, _ = engine_and_runner(options=options)
        request_id = engine.submit_request([5], GenerationParams(max_tokens=4))
        engine.run()
        kinds = [event.kind.name for event in engine.request_events(request_id)]
        assert 4 == kinds.count("GENERATED_TOKEN")
        assert "FINISH" == kinds[-1]

    def test_events_that_are_not_kept_are_refused(self):
        """
        Without the option the error names it.
        """
        engine, _ = engine_and_runner()
        request_id = engine.submit_request([5])
        with pytest.raises(SchedulerError, match="track_request_events") as refused:
            engine.request_events(request_id)
        assert "EVENTS_NOT_TRACKED" == refused.value.reason
