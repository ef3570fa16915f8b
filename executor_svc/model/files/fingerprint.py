"""The model's identity: equal fingerprints mean equal weights, tokenizer and number type."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from executor_svc.model.files.tokenizer_files import TOKENIZER_FILES

_NUM_THREADS = 2


@dataclass(frozen=True, slots=True)
class FileDigest:
    """A file's name and sha256, hex."""

    name: str
    digest: str


def model_files(model_dir: Path, weight_files: Sequence[Path]) -> list[Path]:
    """
    Return the files that decide the tokens of a model, in one order on every rank.

    Args:
        model_dir: Directory of config.json and the tokenizer files.
        weight_files: Files that hold the weights.
    """
    tokenizer = (model_dir / name for name in TOKENIZER_FILES)
    return [
        *weight_files,
        model_dir / "config.json",
        *(file for file in tokenizer if file.is_file()),
    ]


def file_digests(files: Sequence[Path]) -> list[FileDigest]:
    """
    Hash each file by itself, so that shards are read in parallel, and ranks can divide the files.

    sha256 releases the interpreter's lock, so a caller may load the weights meanwhile, and the disk
    is read once. It takes about a second per GB and thread.
    """
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="fingerprint") as pool:
        digests = list(pool.map(_file_digest, files))
    return [FileDigest(file.name, digest) for file, digest in zip(files, digests, strict=True)]


def fingerprint_of(digests: Iterable[FileDigest], dtype: str) -> str:
    """
    Return the fingerprint: the hash of the number type and of the sorted names and hashes.

    Args:
        digests: Those of all `model_files`, in any order.
        dtype: Type that the model is computed in.

    Returns:
        sha256, hex.
    """
    total = hashlib.sha256(f"dtype={dtype}\n".encode())
    for file in sorted(digests, key=lambda file: (file.name, file.digest)):
        total.update(f"{file.name} {file.digest}\n".encode())
    return total.hexdigest()


def _file_digest(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
