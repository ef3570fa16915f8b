"""Tokens that an executor without a model returns."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from executor_svc.model.files.tokenizer_files import TokenizerFile
from tandem.errors import InvalidModel
from tandem.link.batch import Admission, Int32Column

_WORD_START = "Ġ"
"""Character that byte-level tokenizers write for a space."""
_POSITION_MIX = np.uint64(0x9E3779B97F4A7C15)
_TOKEN_MIX = np.uint64(0xC2B2AE3D27D4EB4F)
_ROUND_MIX = np.uint64(0xFF51AFD7ED558CCD)
_ROUND_SHIFT = np.uint64(32)
_HALF = np.uint64(32)
_MASK = (1 << 64) - 1


class ChainedTokens:
    """
    Tokens that each depend on the one before.

    A sequence's next token is a pure function of the token before it, its position, the request's
    seed and choice, and the model's seed, but not of slots, batches or time. So a sequence that is
    continued elsewhere gets the same tokens if, and only if, its history is right. Tokens are whole
    words, so that the detokenizer holds none back; none is EOS.
    """

    def __init__(self, num_slots: int, words: Int32Column, model_seed: int) -> None:
        """
        Make the state of all slots.

        Args:
            num_slots: Number of slots.
            words: Ids to choose from, shape ``[W]``.
            model_seed: Seed of the model; other seeds give other tokens.
        """
        self._words = words
        self._num_words = np.uint64(len(words))
        self._model_seed = model_seed
        self._last = np.zeros(num_slots, np.int32)
        self._seed = np.zeros(num_slots, np.uint64)

    def admit(self, admission: Admission) -> None:
        """Start a request in the slot that its admission names."""
        sampling = admission.sampling
        mixed = sampling.seed * 0x9E3779B97F4A7C15 + sampling.choice * 0xD6E8FEB86659FD93
        self._seed[admission.slot] = (mixed + self._model_seed * 0xA24BAED4963EE407) & _MASK
        self._last[admission.slot] = admission.token_ids[-1]

    def draw(self, slot: Int32Column, position: Int32Column) -> Int32Column:
        """Draw the tokens at `position` of slots and keep them as the last ones; shape ``[R]``."""
        slots = slot.astype(np.intp)
        mixed: NDArray[np.uint64] = self._seed[slots] + position.astype(np.uint64) * _POSITION_MIX
        mixed ^= self._last[slots].astype(np.uint64) * _TOKEN_MIX
        mixed ^= mixed >> _ROUND_SHIFT
        mixed *= _ROUND_MIX
        mixed ^= mixed >> _ROUND_SHIFT
        index = (mixed >> _HALF) * self._num_words >> _HALF  # in [0, W), without dividing
        token = self._words[index.astype(np.intp)]
        self._last[slots] = token
        return token


def words_of(files: Sequence[TokenizerFile]) -> Int32Column:
    """
    Return the ids of a tokenizer that stand for a space and ASCII letters.

    Raises:
        InvalidModel: There is no tokenizer.json, or it has no such ids.
    """
    for file in files:
        if file.name == "tokenizer.json":
            vocabulary = json.loads(file.content)["model"].get("vocab", {})
            words = sorted(
                number
                for text, number in dict(vocabulary).items()
                if text.startswith(_WORD_START) and text[1:].isascii() and text[1:].isalpha()
            )
            if words:
                return np.array(words, np.int32)
    raise InvalidModel("a tokenizer.json with a byte-level vocabulary is needed")


def vocab_size_of(files: Sequence[TokenizerFile]) -> int:
    """Return one more than the highest id of tokenizer.json."""
    ids = [0]
    for file in files:
        if file.name == "tokenizer.json":
            tokenizer = json.loads(file.content)
            ids += dict(tokenizer["model"].get("vocab", {})).values()
            ids += [token["id"] for token in tokenizer.get("added_tokens", ())]
    return max(ids) + 1
