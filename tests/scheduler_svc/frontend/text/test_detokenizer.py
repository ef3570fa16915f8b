"""Text of streamed tokens equals the tokenizer's own decoding of all of them."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings
from tokenizers import Tokenizer, decoders

from scheduler_svc.frontend.text.detokenizer import (
    ByteDetokenizer,
    BytePiece,
    PieceDetokenizer,
    decode_all,
)
from scheduler_svc.frontend.text.tokenizer import TextModel
from scheduler_svc.frontend.text.vocabulary import detokenizer_factory
from tandem.errors import InvalidModel
from tests.scheduler_svc.frontend.small_models import (
    byte_level_tokenizer,
    llama_like_tokenizer,
    metaspace_tokenizer,
    save_model,
    word_tokenizer,
)

BUNDLED = Path(__file__).parents[4] / "deploy" / "models" / "tandem-py"

TOKENIZERS = {
    "byte-level": byte_level_tokenizer(),
    "llama-like": llama_like_tokenizer(),
    "metaspace-always": metaspace_tokenizer("always"),
    "metaspace-never": metaspace_tokenizer("never"),
    "wordpiece": word_tokenizer(decoders.WordPiece()),
    "wordpiece-plain": word_tokenizer(decoders.WordPiece(prefix="@@", cleanup=False)),
    "no-decoder": word_tokenizer(None),
    "bundled": Tokenizer.from_file(str(BUNDLED / "tokenizer.json")),
}


def byte_detokenizer(*tokens: bytes) -> ByteDetokenizer:
    """Return a detokenizer for a vocabulary of these tokens, ids from 0."""
    return ByteDetokenizer({at: BytePiece.of(raw) for at, raw in enumerate(tokens)})


@pytest.fixture(scope="module")
def text_models(tmp_path_factory):
    return {
        name: TextModel.load(save_model(tmp_path_factory.mktemp(name), tokenizer))
        for name, tokenizer in TOKENIZERS.items()
    }


class TestWholeText:
    @pytest.mark.parametrize("name", TOKENIZERS)
    @settings(max_examples=150, deadline=None)
    @given(data=st.data())
    def test_any_ids_decode_as_the_tokenizer_does(self, text_models, name, data):
        """
        Any sequence of ids, invalid UTF-8 and special tokens included, gives the one-shot text.
        """
        tokenizer = TOKENIZERS[name]
        ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=40))
        detokenizer = text_models[name].detokenizer([])
        assert tokenizer.decode(ids, skip_special_tokens=True) == decode_all(detokenizer, ids)

    @pytest.mark.slow
    @settings(max_examples=300, deadline=None)
    @given(raw=st.lists(st.binary(min_size=1, max_size=4), max_size=12))
    @example(raw=[b"\xef\xbf", b"\xbd"])
    @example(raw=[b"\xf0\x9f", b"\x98\xe2", b"\x82a"])
    @example(raw=[b"\xed\xa0\x80", b"\xf4\x90", b"\x80\x80"])
    def test_random_bytes_decode_as_a_whole(self, raw):
        """
        The text of bytes that are cut into tokens anywhere is the lossy UTF-8 decoding of all of
        them.
        """
        whole = b"".join(raw).decode(errors="replace")
        assert whole == decode_all(byte_detokenizer(*raw), range(len(raw)))

    @settings(max_examples=100, deadline=None)
    @given(text=st.text(max_size=40))
    @pytest.mark.parametrize("name", ["byte-level", "bundled"])
    def test_encoded_text_comes_back(self, text_models, name, text):
        """
        Decoding the encoding of any Unicode text gives the text.
        """
        ids = TOKENIZERS[name].encode(text, add_special_tokens=False).ids
        detokenizer = text_models[name].detokenizer([])
        restored = TOKENIZERS[name].decode(ids, skip_special_tokens=True)
        assert restored == decode_all(detokenizer, ids)

    def test_id_outside_the_tokenizer_has_no_text(self, text_models):
        """
        Ids of a padded vocabulary, unknown to the tokenizer, have empty text.
        """
        assert decode_all(text_models["byte-level"].detokenizer([]), [100_000, 70]) == "c"


class TestBytes:
    @pytest.mark.parametrize("name", TOKENIZERS)
    @settings(max_examples=150, deadline=None)
    @given(data=st.data())
    def test_bytes_of_all_tokens_are_the_text(self, text_models, name, data):
        """
        Bytes of tokens, each asked for at its place, are together the UTF-8 of the tokenizer's own
        one-shot text, wherever they are UTF-8 at all.
        """
        tokenizer = TOKENIZERS[name]
        ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=40))
        detokenizer = text_models[name].detokenizer([])
        raw = []
        for token_id in ids:
            raw.append(detokenizer.bytes_of(token_id))
            detokenizer.push(token_id)
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        try:
            told = b"".join(raw).decode()
        except UnicodeDecodeError:
            assert "\ufffd" in whole
        else:
            assert whole == told

    @settings(max_examples=100, deadline=None)
    @given(text=st.text(max_size=40))
    @pytest.mark.parametrize("name", ["byte-level", "bundled", "llama-like"])
    def test_split_characters_come_together(self, text_models, name, text):
        """
        Any Unicode text, most of whose characters are split over tokens, comes back byte by byte.
        """
        ids = TOKENIZERS[name].encode(text, add_special_tokens=False).ids
        detokenizer = text_models[name].detokenizer([])
        raw = b""
        for token_id in ids:
            raw += detokenizer.bytes_of(token_id)
            detokenizer.push(token_id)
        assert TOKENIZERS[name].decode(ids, skip_special_tokens=True).encode() == raw

    def test_asking_changes_nothing(self):
        """
        Bytes of tokens that are not drawn leave the text as it is.
        """
        pieces = {0: " a", 1: 0xE2, 2: 0x82, 3: 0xAC, 4: 0x20}
        detokenizer = PieceDetokenizer(pieces, strip_spaces=1)
        text = []
        for token_id in (4, 0, 1, 2, 3):
            assert b"a" == detokenizer.bytes_of(0).strip()
            text.append(detokenizer.push(token_id))
        assert " a" == "".join(f"{one.head or ''}{one.text}" for one in text)
        assert "\u20ac" == detokenizer.flush()


class TestPlainText:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", TOKENIZERS)
    @settings(max_examples=150, deadline=None)
    @given(data=st.data())
    def test_plain_text_is_that_of_one_by_one(self, text_models, name, data):
        """
        Tokens with plain text give that text one by one too, and leave no text open; tokens with
        open text before or after them have none.
        """
        some_ids = st.lists(st.integers(0, TOKENIZERS[name].get_vocab_size() - 1), max_size=6)
        before, ids = data.draw(some_ids), data.draw(some_ids)
        detokenizer = text_models[name].detokenizer([])
        is_clean = all([detokenizer.push(token_id).clean for token_id in before][-1:])
        text = detokenizer.plain_text(ids)
        decoded = [detokenizer.push(token_id) for token_id in ids]
        if text is None:
            return
        assert is_clean
        assert text == "".join(f"{one.head or ''}{one.text}" for one in decoded)
        assert all([one.clean for one in decoded][-1:])
        assert "" == detokenizer.flush()

    @pytest.mark.parametrize("name", TOKENIZERS)
    def test_words_have_plain_text(self, text_models, name):
        """
        Words in the middle of an output have plain text with every tokenizer.
        """
        ids = TOKENIZERS[name].encode("a b a b", add_special_tokens=False).ids
        detokenizer = text_models[name].detokenizer([])
        for token_id in ids:
            detokenizer.push(token_id)
        assert detokenizer.plain_text(ids) is not None


class TestOneTokenAtATime:
    def test_half_code_point_waits_for_its_other_half(self):
        """
        A token that ends inside a code point is not clean until the code point is complete.
        """
        detokenizer = byte_detokenizer(b"a\xe2\x82", b"\xac!")
        assert (None, "a", False) == detokenizer.push(0)
        assert (None, "€!", True) == detokenizer.push(1)

    def test_broken_code_point_ends_where_its_token_ends(self):
        """
        The mark of a code point that the next token shows to be broken belongs to the earlier
        token.
        """
        detokenizer = byte_detokenizer(b"\xe2\x82", b"x")
        detokenizer.push(0)
        assert ("\ufffd", "x", True) == detokenizer.push(1)

    def test_mark_of_bytes_of_two_tokens_belongs_to_the_later_one(self):
        """
        Broken bytes that reach into the next token make only that one clean.
        """
        detokenizer = byte_detokenizer(b"\xf0", b"\x9fa")
        detokenizer.push(0)
        assert (None, "\ufffda", True) == detokenizer.push(1)

    def test_real_replacement_character_is_a_character(self):
        """
        A U+FFFD that the model itself wrote across two tokens belongs to both of them.
        """
        detokenizer = byte_detokenizer(b"\xef\xbf", b"\xbd")
        detokenizer.push(0)
        assert (None, "\ufffd", True) == detokenizer.push(1)

    def test_endless_broken_bytes_never_pile_up(self):
        """
        Lead bytes that never complete are released one token later, however many there are.
        """
        detokenizer = byte_detokenizer(b"\xe2")
        detokenizer.push(0)
        assert {("\ufffd", "", False)} == {detokenizer.push(0) for _ in range(1000)}

    def test_byte_run_waits_for_its_end(self):
        """
        A run of byte tokens becomes text when another token ends it.
        """
        detokenizer = PieceDetokenizer({0: 0xE2, 1: 0x82, 2: 0xAC, 3: "x"}, strip_spaces=0)
        assert [(None, "", False)] * 3 == [detokenizer.push(at) for at in range(3)]
        assert ("€", "x", True) == detokenizer.push(3)

    def test_output_after_a_prompt_keeps_its_leading_space(self, text_models):
        """
        An output loses the space that marks a word's beginning only if it begins the sequence.
        """
        the = TOKENIZERS["llama-like"].token_to_id("\u2581the")
        model = text_models["llama-like"]
        assert " the" == decode_all(model.detokenizer([1, 270]), [the])
        assert "the" == decode_all(model.detokenizer([1]), [the])

    def test_word_after_a_prompt_keeps_its_space_and_a_part_has_none(self, text_models):
        """
        A word that follows a prompt has a space before it; a later part of a word and a full stop
        have none.
        """
        ids = [TOKENIZERS["wordpiece"].token_to_id(each) for each in ("the", "##ing", ".")]
        model = text_models["wordpiece"]
        assert " theing." == decode_all(model.detokenizer([1, ids[0]]), ids)
        assert "theing." == decode_all(model.detokenizer([1]), ids)


class TestUnsupported:
    @pytest.mark.parametrize(
        "decoder",
        [
            {"type": "BPEDecoder"},
            {"type": "Sequence", "decoders": [{"type": "WordPiece"}, {"type": "Fuse"}]},
            {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "CTC"}]},
            {"content": " ", "start": 1, "stop": 0},
            {"type": None, "content": " ", "start": 1, "stop": 0},
            {"type": ["Strip"], "content": " ", "start": 1, "stop": 0},
            {"type": "Strip", "content": " ", "start": 1, "stop": 1},
            {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"},
        ],
        ids=[
            "bpe",
            "wordpiece-and-more",
            "ctc",
            "no-type",
            "null-type",
            "list-type",
            "strip-end",
            "regex",
        ],
    )
    def test_decoder_that_cannot_be_streamed_is_refused(self, decoder):
        """
        A decoder without exact streaming raises InvalidModel, and never gives different text
        silently.
        """
        with pytest.raises(InvalidModel, match=r"cannot be streamed; supported are ByteLevel"):
            detokenizer_factory(TOKENIZERS["byte-level"], decoder)
