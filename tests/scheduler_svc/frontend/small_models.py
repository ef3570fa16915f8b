"""Tokenizer directories for tests, of every kind that the frontend supports."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CORPUS = [
    "def add(a, b):\n    return a + b\n",
    "the quick brown fox jumps over the lazy dog, again and again",
    "Grüße aus Köln: naïve café, 你好世界, 😀😃 ok",
] * 4

CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def byte_level_tokenizer() -> Tokenizer:
    """Return byte-level BPE with BOS 0, EOS 1, chat marks 2 and 3, and its own BOS rule."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", 0), ("<|end|>", 1)]
    )
    return tokenizer


def llama_like_tokenizer() -> Tokenizer:
    """
    Return BPE on space marks with byte tokens for everything unknown, as sentencepiece models have
    it.
    """
    characters = sorted({*"abcdefghijklmnopqrstuvwxyz,:+()\n", "\u2581", "é", "\ufffd"})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *characters]
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("\u2581", "\u2581"), ("a", "n")]
    tokens += [left + right for left, right in merges]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: at for at, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def metaspace_tokenizer(prepend_scheme: str) -> Tokenizer:
    """Return the vocabulary of `llama_like_tokenizer` with a Metaspace decoder."""
    tokenizer = llama_like_tokenizer()
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    return tokenizer


def word_tokenizer(decoder: decoders.Decoder | None) -> Tokenizer:
    """
    Return words, parts of words and marks that a WordPiece decoder joins, with one special token.
    """
    tokens = ["[UNK]", "[BOS]", "the", "##ing", "@@ing", ".", ",", "!", "'", "n't", "'s", "do not"]
    tokens += ["a", "b", "é", "##", "@@", "don", "##a##b", "...", "[x]", "ing", "o ' c"]
    tokenizer = Tokenizer(
        models.WordLevel({token: at for at, token in enumerate(tokens)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[BOS]"])
    tokenizer.add_tokens([AddedToken("<added>", special=False, normalized=False)])
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


def save_model(
    directory: Path, tokenizer: Tokenizer | None = None, *, chat_template: str | None = CHATML
) -> Path:
    """Write the files that a frontend reads of a model directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_level_tokenizer()).save(str(directory / "tokenizer.json"))
    config: dict[str, object] = {
        "bos_token": "<|begin|>",
        "eos_token": {"__type": "AddedToken", "content": "<|end|>"},
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
