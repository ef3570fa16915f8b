"""Tokenizers of the embedded engine."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_embedded import ConfigError, HuggingFaceTokenizer, SimpleTokenizer
from tests.model_zoo import llama_mha

SIMPLE = SimpleTokenizer()


class TestSimpleTokenizer:
    @settings(max_examples=200, deadline=None)
    @given(st.text(st.characters(blacklist_categories=())))
    def test_every_text_survives_a_round_trip(self, text):
        """
        Decoding the ids of any Unicode text gives the text.
        """
        assert text == SIMPLE.decode(SIMPLE.encode(text))

    def test_specials_come_first(self):
        """
        PAD, BOS, EOS and UNK are 0 to 3.
        """
        found = (
            SIMPLE.pad_token_id, SIMPLE.bos_token_id, SIMPLE.eos_token_id, SIMPLE.unk_token_id
        )  # fmt: skip
        assert (0, 1, 2, 3) == found

    def test_ascii_has_one_id_per_character(self):
        """
        Characters 32 to 126 are 4 to 98, newline, carriage return and tab 99 to 101.
        """
        assert [1, 4, 98, 99, 100, 101] == SIMPLE.encode(" ~\n\r\t")

    def test_other_characters_are_bytes(self):
        """
        A character outside ASCII is its UTF-8 bytes, from 102 on.
        """
        assert [1, 102 + 0xC3, 102 + 0xA9] == SIMPLE.encode("é")
        assert 358 == SIMPLE.vocab_size

    def test_a_prompt_has_a_beginning_and_no_end(self):
        """
        A prompt begins with BOS and never ends with EOS.
        """
        assert SIMPLE.bos_token_id == SIMPLE.encode("x")[0]
        assert SIMPLE.eos_token_id not in SIMPLE.encode("x")

    def test_ids_without_text_are_dropped(self):
        """
        Specials, negative ids and ids past the vocabulary have no text.
        """
        assert "ab" == SIMPLE.decode([0, 1, 69, 2, 3, -1, 70, 358])

    def test_bytes_that_are_no_text_become_replacement_characters(self):
        """
        Bytes that a model makes are shown as text as far as they are UTF-8.
        """
        assert "a\ufffdb" == SIMPLE.decode([69, 102 + 0xFF, 70])


class TestHuggingFaceTokenizer:
    def test_a_models_own_tokenizer_is_read(self, tmp_path):
        """
        The directory's tokenizer.json encodes and decodes, and its config names the specials.
        """
        tokenizer = HuggingFaceTokenizer(llama_mha(tmp_path / "model"))
        assert "grüße" == tokenizer.decode(tokenizer.encode("grüße"))
        assert (256, 257, None) == (
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
            tokenizer.pad_token_id,
        )
        assert 258 == tokenizer.vocab_size

    def test_a_missing_file_is_named(self, tmp_path):
        """
        Without a tokenizer.json the error says where it was looked for.
        """
        with pytest.raises(ConfigError, match=r"tokenizer\.json does not exist"):
            HuggingFaceTokenizer(tmp_path)

    @pytest.mark.parametrize(
        ("content", "why"),
        [("{", "is not valid JSON"), ("{}", "is invalid"), ("[]", "must hold a JSON object")],
    )
    def test_a_broken_file_is_named(self, tmp_path, content, why):
        """
        A file that is no tokenizer is refused with its name.
        """
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ConfigError, match=rf"tokenizer\.json {why}"):
            HuggingFaceTokenizer(tmp_path)
