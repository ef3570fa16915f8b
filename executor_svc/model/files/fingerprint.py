"""The model's identity: equal fingerprints mean equal weights, tokenizer and number type."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from executor_svc.model.files.tokenizer_files import TOKENIZER_FILES

_NUM_THREADS = 2


def model_fingerprint(model_dir: Path, weight_files: Sequence[Path], dtype: str) -> str:
    """
    Hash all that decides the tokens of a model: its files and the number type.

    Each file is hashed by itself and the fingerprint is the hash of the sorted names and hashes, so
    shards are read in parallel. sha256 releases the interpreter's lock, so a caller may load the
    weights meanwhile, and the disk is read once. It takes about a second per GB and thread.

    Args:
        model_dir: Directory of config.json and the tokenizer files.
        weight_files: Files that hold the weights.
        dtype: Type that the model is computed in.

    Returns:
        sha256, hex.
    """
    files = [model_dir / "config.json", *weight_files]
    files += [model_dir / name for name in TOKENIZER_FILES if (model_dir / name).is_file()]
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="fingerprint") as pool:
        digests = list(pool.map(_file_digest, files))
    named = sorted((file.name, digest) for file, digest in zip(files, digests, strict=True))
    total = hashlib.sha256(f"dtype={dtype}\n".encode())
    for name, digest in named:
        total.update(f"{name} {digest}\n".encode())
    return total.hexdigest()


def _file_digest(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
