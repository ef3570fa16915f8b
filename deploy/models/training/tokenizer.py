"""
The tokenizer: byte-level BPE whose pieces follow the layout of Python code.

A newline is always a token of its own and an indentation is never joined to the word after
it, so a prompt that ends at a line end or after an indentation is cut exactly as the
training text was.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .corpus import collect, documents, write_manifest

VOCAB_SIZE = 4096
BOS = "<|begin|>"
EOS = "<|end|>"
BOS_ID = 0
EOS_ID = 1
# newline | indentation | tabs | identifier with one leading mark | digit | marks | space
PIECES = (
    r"\r?\n|[ ]{2,}|\t+|[^\r\n\p{L}\p{N}_]?[\p{L}_]+|\p{N}"
    r"| ?[^\s\p{L}\p{N}_]+|\s"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learn a vocabulary of ``VOCAB_SIZE`` tokens; ids 0 and 1 are begin and end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> npt.NDArray[np.uint16]:
    """Return one stream ``begin text end begin text end ...`` of token ids, shape ``[N]``."""
    pieces: list[npt.NDArray[np.uint16]] = []
    for start in range(0, len(texts), 256):
        pieces += [
            np.array([BOS_ID, *encoding.ids, EOS_ID], dtype=np.uint16)
            for encoding in tokenizer.encode_batch(texts[start : start + 256])
        ]
    return np.concatenate(pieces)


def main() -> None:
    """Write the manifest to the model and the token streams to ``--work``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of training files")
    parser.add_argument("--model", type=Path, required=True, help="folder of the bundled model")
    parser.add_argument(
        "--train-tokenizer", action="store_true", help="learn and write a new tokenizer.json"
    )
    arguments = parser.parse_args()
    work, model = arguments.work, arguments.model
    work.mkdir(parents=True, exist_ok=True)
    model.mkdir(parents=True, exist_ok=True)
    files = collect()
    write_manifest(files, model / "manifest.json")
    train = list(documents(files, held_out=False))
    if arguments.train_tokenizer:
        train_tokenizer(train).save(str(model / "tokenizer.json"), pretty=False)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for split, texts in (("train", train), ("held_out", list(documents(files, held_out=True)))):
        stream = encode_documents(tokenizer, texts)
        np.save(work / f"{split}.npy", stream)
        text_bytes = sum(len(text.encode()) for text in texts)
        print(f"{split} files={len(texts)} bytes={text_bytes} tokens={len(stream)}")


if __name__ == "__main__":
    main()
