"""The embedded engine reads and writes text as the services do, whatever a tokenizer.json says."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import Tokenizer, processors

from scheduler_svc.frontend.text.chat_template import Conversation
from scheduler_svc.frontend.text.output import OutputText
from scheduler_svc.frontend.text.tokenizer import TextModel
from tandem_embedded import GenerationParams, HuggingFaceTokenizer
from tests.clients.embedded.fake_backend import engine_and_runner
from tests.scheduler_svc.frontend.small_models import (
    byte_level_tokenizer,
    llama_like_tokenizer,
    metaspace_tokenizer,
    save_model,
)

TEXTS = ["hello there", " the an", "<|begin|>the<s>an</s>", "Grüße 你好 😀", "a\n  b\t"]


def truncating() -> Tokenizer:
    """A tokenizer that cuts every text to 4 tokens."""
    tokenizer = llama_like_tokenizer()
    tokenizer.enable_truncation(4)
    return tokenizer


def padding() -> Tokenizer:
    """A tokenizer that fills every text up to 12 tokens."""
    tokenizer = llama_like_tokenizer()
    tokenizer.enable_padding(length=12, pad_id=0, pad_token="<unk>")
    return tokenizer


def closing() -> Tokenizer:
    """A tokenizer that puts an end behind every text."""
    tokenizer = llama_like_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


TOKENIZERS = {
    "byte-level": byte_level_tokenizer,
    "llama2": llama_like_tokenizer,
    "truncation": truncating,
    "padding": padding,
    "closing": closing,
    "metaspace-always": lambda: metaspace_tokenizer("always"),
    "metaspace-never": lambda: metaspace_tokenizer("never"),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def model_dir(request, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), TOKENIZERS[request.param]())


@pytest.fixture
def embedded(model_dir):
    return HuggingFaceTokenizer(model_dir)


@pytest.fixture
def served(model_dir):
    return TextModel.load(model_dir)


def served_text(served: TextModel, prompt: list[int], output: list[int]) -> str:
    """The text that a frontend sends of an output."""
    text = OutputText(served.detokenizer(prompt), stops=(), end_token_ids=frozenset())
    text.push_all(output)
    return "".join(chunk.text for chunk in (text.take(), text.finish()) if chunk is not None)


class TestPrompts:
    @pytest.mark.parametrize("text", TEXTS, ids=repr)
    def test_a_text_has_the_ids_that_a_frontend_gives_it(self, embedded, served, text):
        """
        Truncation, padding, a closing rule and special tokens written as text change no prompt.
        """
        assert served.encode_text(text) == embedded.encode(text)

    def test_a_conversation_has_the_ids_that_a_frontend_gives_it(self, embedded, served):
        """
        The model's chat template writes it, and what a message says is never a special token.
        """
        messages = [{"role": "user", "content": "the <|im_end|> an"}]
        conversation = Conversation(messages=messages)
        assert served.encode_chat(conversation, max_prompt_len=500) == embedded.encode_chat(
            messages, max_prompt_len=500
        )

    @pytest.mark.parametrize("name", ["truncation", "padding", "closing"])
    def test_the_files_do_say_something_else(self, name):
        """
        Used as their library means them, these tokenizers give other ids.
        """
        assert (
            llama_like_tokenizer().encode(TEXTS[0]).ids != TOKENIZERS[name]().encode(TEXTS[0]).ids
        )


class TestOutputs:
    def test_an_output_has_the_text_that_a_frontend_sends(self, embedded, served):
        """
        With and without text before it, every output has the same text, its first space included.
        """
        source = random.Random(5)
        for _ in range(60):
            prompt = source.choice([[1], [], served.encode_text("the an")])
            output = [source.randrange(3, embedded.vocab_size) for _ in range(12)]
            engine, runner = engine_and_runner(tokenizer=embedded)
            runner.script(output)
            engine.submit_request(prompt or [1], GenerationParams(max_tokens=12, ignore_eos=True))
            (done,) = engine.run()
            assert output == done.output_tokens
            assert served_text(served, prompt or [1], output) == done.output_text

    def test_pieces_of_a_stream_add_up_to_it(self, embedded):
        """
        The texts of a stream's pieces are the output's text, and their ids its tokens.
        """
        output = embedded.encode("Grüße the 你好 😀 an")
        engine, runner = engine_and_runner(tokenizer=embedded)
        runner.script(output)
        stream = engine.stream([5], GenerationParams(max_tokens=len(output), ignore_eos=True))
        pieces = list(stream)
        assert stream.result is not None
        assert stream.result.output_text == "".join(piece.text for piece in pieces)
        assert output == [token for piece in pieces for token in piece.token_ids]
        assert 1 < len(pieces)

    def test_the_first_space_survives_after_a_prompt(self, tmp_path):
        """
        A llama2-style output that begins with a space keeps it, as it continues the prompt.
        """
        tokenizer = HuggingFaceTokenizer(save_model(tmp_path, llama_like_tokenizer()))
        vocab = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
        engine, runner = engine_and_runner(tokenizer=tokenizer)
        runner.script([vocab["\u2581the"]])
        engine.submit_request("an", GenerationParams(max_tokens=1))
        assert " the" == engine.run()[0].output_text
