"""Tokenization of prompts, by the tokenizer and chat template of the served model."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from scheduler_svc.frontend.text.chat_template import ChatTemplate, Conversation
from scheduler_svc.frontend.text.detokenizer import Detokenizer, NoText
from scheduler_svc.frontend.text.vocabulary import (
    DetokenizerFactory,
    detokenizer_factory,
    special_token_ids,
)
from tandem.errors import ChatTemplateError, InvalidModel, InvalidParameter

PRIVATE_USE = range(0xF0000, 0xFFFFE)
"""Code points of a private-use plane of Unicode, which have no meaning elsewhere."""
MAX_QUOTED_CHARS = 300
"""Limit of the library's error text about a file, which may quote any length of the file."""
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class TextModel:
    """
    Tokenizer, detokenizer and chat template of one model; immutable and thread-safe once loaded.

    A model without tokenizer.json can be used with token ids only, and its output has no text.
    """

    def __init__(
        self,
        *,
        plain: Tokenizer | None,
        marked: Tokenizer | None,
        chat_template: ChatTemplate | None,
        make_detokenizer: DetokenizerFactory,
        max_token_bytes: float,
        special_tokens: Mapping[str, str],
    ) -> None:
        """
        Use `TextModel.load` instead.

        Args:
            plain: Tokenizer that takes special tokens in text as ordinary text.
            marked: Tokenizer that recognises them, for text written by the chat template.
            chat_template: The chat template; None if the model has none.
            make_detokenizer: Makes the detokenizer for the output of a prompt.
            max_token_bytes: Most UTF-8 bytes of prompt that one token stands for; inf if unknown.
            special_tokens: Texts of the special tokens that the model's files name, by name.
        """
        self._plain = plain
        self._marked = marked
        self._chat_template = chat_template
        self._make_detokenizer = make_detokenizer
        self._max_token_bytes = max_token_bytes
        self._special_tokens = special_tokens
        self._token_texts: dict[int, str] = {}
        self._special_texts = _special_texts(marked) if marked else {}
        self._special_pattern = re.compile(
            "|".join(re.escape(text) for text in sorted(self._special_texts, key=len, reverse=True))
            or r"(?!)"
        )

    @classmethod
    def load(cls, directory: Path) -> TextModel:
        """
        Load a model's tokenizer.json, tokenizer_config.json, special_tokens_map.json and
        chat_template.jinja, as far as they exist.

        Raises:
            InvalidModel: A file is unreadable, invalid or not supported; the text says which one.
        """
        source = _read(directory / "tokenizer.json")
        if source is None:
            return cls(
                plain=None,
                marked=None,
                chat_template=None,
                make_detokenizer=lambda _: NoText(),
                max_token_bytes=math.inf,
                special_tokens={},
            )
        sections = _parse(source, directory / "tokenizer.json")
        plain, marked = _tokenizer(source, directory), _tokenizer(source, directory)
        plain.encode_special_tokens = True
        config = _read_json(directory / "special_tokens_map.json")
        config |= _read_json(directory / "tokenizer_config.json")
        template = _template_source(directory, config)
        special_tokens = {
            name: text for name in SPECIAL_TOKEN_NAMES if (text := _content(config.get(name)))
        }
        return cls(
            plain=plain,
            marked=marked,
            chat_template=None if template is None else ChatTemplate(template, special_tokens),
            make_detokenizer=detokenizer_factory(plain, sections.get("decoder")),
            max_token_bytes=_max_token_bytes(plain, sections["model"]),
            special_tokens=special_tokens,
        )

    @property
    def has_chat_template(self) -> bool:
        """True if conversations can be encoded."""
        return self._chat_template is not None

    @property
    def has_tokenizer(self) -> bool:
        """True if prompts can be text and outputs have text."""
        return self._plain is not None

    @property
    def vocab_size(self) -> int:
        """Number of token ids, which are in [0, vocab_size); 0 without a tokenizer."""
        plain = self._plain
        return 0 if plain is None else int(plain.get_vocab_size(with_added_tokens=True))

    def special_token_id(self, name: str) -> int | None:
        """Return the id of a token of `SPECIAL_TOKEN_NAMES`; None if the files do not name it."""
        text = self._special_tokens.get(name)
        return None if text is None or self._plain is None else self._plain.token_to_id(text)

    def token_text(self, token_id: int) -> str:
        """Return a token's text by itself, for people; empty without a tokenizer."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self._decode_alone(token_id)
        return text

    def _decode_alone(self, token_id: int) -> str:
        if self._plain is None:
            return ""
        # Some decoders drop the space that a first token begins with.
        before: list[int] = self._plain.encode("a", add_special_tokens=False).ids
        start = self._plain.decode(before, skip_special_tokens=False)
        both: str = self._plain.decode([*before, token_id], skip_special_tokens=False)
        return both.removeprefix(start)

    def min_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of `text`, in constant time."""
        return math.ceil(len(text) / self._max_token_bytes)

    def encode_text(self, text: str) -> list[int]:
        """
        Return the ids of a plain prompt: the tokens that the tokenizer's own rule puts in front,
        then the text, in which special tokens are not recognised.

        Raises:
            InvalidParameter: The model has no tokenizer.
        """
        if self._plain is None:
            raise _no_tokenizer()
        encoding = self._plain.encode(text)
        ids: list[int] = encoding.ids
        # A rule that also closes the sequence (an EOS, say) is for training: output must follow.
        added = encoding.special_tokens_mask
        end = len(ids)
        while end and added[end - 1]:
            end -= 1
        return ids[:end] if end else ids

    def encode_marked(self, text: str) -> list[int]:
        """
        Return the ids of a prompt that its author has rendered: special tokens are recognised in
        it, and no token is put in front.

        Raises:
            InvalidParameter: The model has no tokenizer.
        """
        if self._marked is None:
            raise _no_tokenizer()
        ids: list[int] = self._marked.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, keep_special_tokens: bool) -> str:
        """
        Return the text of ids.

        Raises:
            InvalidParameter: The model has no tokenizer.
        """
        if self._plain is None:
            raise _no_tokenizer()
        text: str = self._plain.decode(list(token_ids), skip_special_tokens=not keep_special_tokens)
        return text

    def encode_chat(self, conversation: Conversation, *, max_prompt_len: int) -> list[int]:
        """
        Return the ids of a conversation as the chat template writes it.

        Special tokens are recognised in the template's text, never in the text of a message.

        Args:
            conversation: Its messages, and the template's other variables.
            max_prompt_len: Longest prompt that can be used, in tokens.

        Raises:
            ChatTemplateError: There is no template, or it refused the messages or failed.
        """
        if self._chat_template is None or self._marked is None or self._plain is None:
            raise ChatTemplateError(
                "this model has no chat template: send the prompt as text or token_ids",
                field="chat",
            )
        limit = self._max_token_bytes * (max_prompt_len + 1)
        max_chars = 2**26 if math.isinf(limit) else max(int(limit), 65536)
        guard = _Guard(self._special_pattern, conversation)
        rendered = self._chat_template.render(guard.conversation, max_chars=max_chars)
        if not guard.is_needed:
            ids: list[int] = self._marked.encode(rendered, add_special_tokens=False).ids
            return ids
        return self._encode_guarded(guard, rendered)

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        """Return a detokenizer for the output that follows `prompt`."""
        return self._make_detokenizer(prompt)

    def _encode_guarded(self, guard: _Guard, rendered: str) -> list[int]:
        assert self._plain is not None
        ids: list[int] = []
        begin = 0
        for found in [*self._special_pattern.finditer(rendered), None]:
            text = rendered[begin : found.start() if found else len(rendered)]
            if text:
                ids += self._plain.encode(guard.restore(text), add_special_tokens=False).ids
            if found:
                ids.append(self._special_texts[found[0]])
                begin = found.end()
        return ids


class _Guard:
    """
    Guard against special tokens in the text of a conversation: it replaces each by a private-use
    character while the template is rendered, so that the tokenizer does not recognise it.

    Only conversations that contain one are changed.

    Attributes:
        is_needed: True if a text contains a special token.
        conversation: The conversation with these texts replaced.
    """

    def __init__(self, pattern: re.Pattern[str], conversation: Conversation) -> None:
        values = [conversation.messages, conversation.tools, conversation.template_args]
        texts = [text for value in values for text in _texts_in(value)]
        found = sorted({hit for text in texts for hit in pattern.findall(text)})
        self.is_needed = bool(found)
        self.conversation = conversation
        if not found:
            return
        used: set[str] = set().union(*texts)
        free = (chr(code) for code in PRIVATE_USE if chr(code) not in used)
        self._hidden: dict[str, str] = dict(zip(found, free, strict=False))
        if len(self._hidden) < len(found):
            raise ChatTemplateError(
                "the messages write special tokens as text and leave no private-use character "
                "unused to tell them apart",
                field="chat.messages",
            )
        self._shown = str.maketrans({char: text for text, char in self._hidden.items()})

        def hide(text: str) -> str:
            return pattern.sub(lambda hit: self._hidden[hit[0]], text)

        messages, tools, template_args = (_with_texts(value, hide) for value in values)
        self.conversation = replace(
            conversation, messages=messages, tools=tools, template_args=template_args
        )

    def restore(self, text: str) -> str:
        """Return `text` with the original texts of the messages."""
        return text.translate(self._shown)


def _texts_in(value: Any) -> Iterator[str]:
    """Yield all texts of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield key
            yield from _texts_in(one)
    elif isinstance(value, Sequence):
        for one in value:
            yield from _texts_in(one)


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with all texts changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _with_texts(one, change) for key, one in value.items()}
    if isinstance(value, Sequence):
        return [_with_texts(one, change) for one in value]
    return value


def _no_tokenizer() -> InvalidParameter:
    return InvalidParameter(
        "this model has no tokenizer, so a prompt must be given as token_ids", field="text"
    )


def _special_texts(tokenizer: Tokenizer) -> dict[str, int]:
    special = special_token_ids(tokenizer)
    return {
        token.content: token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token_id in special
    }


def _tokenizer(source: str, directory: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(source)
    except Exception as error:  # the library raises plain Exception
        why = str(error)[:MAX_QUOTED_CHARS]
        raise InvalidModel(f"{directory / 'tokenizer.json'} is invalid: {why}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _max_token_bytes(tokenizer: Tokenizer, model: Mapping[str, Any]) -> float:
    """Return the most bytes of text of one token; inf if an unknown token hides any number."""
    is_byte_level = model.get("type") == "BPE" and model.get("unk_token") is None
    if not is_byte_level and not model.get("byte_fallback"):
        return math.inf
    return max((len(token.encode()) for token in tokenizer.get_vocab()), default=math.inf)


def _template_source(directory: Path, config: Mapping[str, Any]) -> str | None:
    from_file = _read(directory / "chat_template.jinja")
    if from_file is not None:
        return from_file
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next(
            (entry.get("template") for entry in named if entry.get("name") == "default"), None
        )
    if template is not None and not isinstance(template, str):
        raise InvalidModel(f"{directory / 'tokenizer_config.json'}: chat_template must be text")
    return template


def _content(token: Any) -> str:
    """Return the text of a special token, which files have as text or as an object."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidModel(f"cannot read {path}: {error}") from error


def _parse(source: str, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(source)
    except ValueError as error:
        raise InvalidModel(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidModel(f"{path} must hold a JSON object")
    return content


def _read_json(path: Path) -> dict[str, Any]:
    source = _read(path)
    return {} if source is None else _parse(source, path)
