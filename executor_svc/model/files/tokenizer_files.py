"""The tokenizer and template files of a model, and their messages to a scheduler."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import InvalidModel
from tandem.executor.v1.executor_service_pb2 import GetTokenizerResponse
from tandem.link import MAX_CHUNK_BYTES

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)
"""Files of a model directory that decide the meaning of ids; each may be missing."""


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """One file, with its content when the model was loaded."""

    name: str
    content: bytes


def read_tokenizer_files(model_dir: Path) -> tuple[TokenizerFile, ...]:
    """
    Read those files that exist into memory, so that later edits cannot mix in.

    Raises:
        InvalidModel: tokenizer.json is damaged. The check at the start reports it to the operator;
            otherwise only a scheduler would find it, later.
    """
    files = tuple(
        TokenizerFile(name, (model_dir / name).read_bytes())
        for name in TOKENIZER_FILES
        if (model_dir / name).is_file()
    )
    for file in files:
        if file.name == "tokenizer.json":
            _check_tokenizer(file.content, model_dir / file.name)
    return files


def _check_tokenizer(content: bytes, path: Path) -> None:
    try:
        tokenizer = json.loads(content)
    except ValueError as error:
        raise InvalidModel(f"{path} is not valid JSON: {error}; download it again") from error
    if not isinstance(tokenizer, dict) or not isinstance(tokenizer.get("model"), dict):
        raise InvalidModel(f"{path} describes no tokenizer: it has no model; download it again")


def chunks(files: tuple[TokenizerFile, ...]) -> Iterator[GetTokenizerResponse]:
    """Cut files into messages, one file after another; an empty file is one empty chunk."""
    for file in files:
        last_start = max(0, len(file.content) - 1) // MAX_CHUNK_BYTES * MAX_CHUNK_BYTES
        for start in range(0, last_start + 1, MAX_CHUNK_BYTES):
            yield GetTokenizerResponse(
                name=file.name,
                chunk=file.content[start : start + MAX_CHUNK_BYTES],
                sha256=hashlib.sha256(file.content).hexdigest() if start == last_start else "",
            )
