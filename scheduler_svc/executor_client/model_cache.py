"""Tokenizer and template files of models, fetched from executors into a private directory."""

from __future__ import annotations

import hashlib
import re
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path

from tandem.errors import IncompatibleExecutor, InternalError
from tandem.executor.v1.executor_service_pb2 import GetTokenizerResponse

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MAX_FILE_BYTES = 256 * 1024 * 1024
"""Largest file that is accepted; no tokenizer is larger, and more could fill the disk."""


class ModelCache:
    """
    Folders of tokenizer files, one per model fingerprint, each complete or absent.

    Any thread may use it; frontends only read finished folders.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find(self, fingerprint: str) -> Path | None:
        """Return the folder of a model's files, or None if they were not fetched."""
        folder = self._folder(fingerprint)
        return folder if folder.is_dir() else None

    def store(self, fingerprint: str, chunks: Iterable[GetTokenizerResponse]) -> Path:
        """
        Write the files of a GetTokenizer stream and return their folder.

        Raises:
            IncompatibleExecutor: A file has no valid name, is too large or cut off, or does not
                match its checksum; no file is kept then.
            InternalError: The files cannot be written here; no file is kept then.
        """
        partial = self._directory / f"partial-{threading.get_ident()}"
        folder = self._folder(fingerprint)
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(mode=0o700)
            _write_files(partial, chunks)
            if not folder.is_dir():
                partial.rename(folder)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            if folder.is_dir():  # another executor sent the same files meanwhile
                return folder
            raise InternalError(
                f"the model's tokenizer files cannot be written to {self._directory}: "
                f"{error.strerror}; make room there, or set TMPDIR to a place that has it"
            ) from error
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return folder

    def _folder(self, fingerprint: str) -> Path:
        return self._directory / f"tokenizer-{hashlib.sha256(fingerprint.encode()).hexdigest()}"


def _write_files(folder: Path, chunks: Iterable[GetTokenizerResponse]) -> None:
    name, content = "", bytearray()
    for chunk in chunks:
        if name and chunk.name != name:
            raise IncompatibleExecutor(f"the executor sent {name} without its end")
        if not _FILE_NAME.fullmatch(chunk.name):
            raise IncompatibleExecutor(f"the executor sent a file named {chunk.name!r}")
        name = chunk.name
        content += chunk.chunk
        if len(content) > MAX_FILE_BYTES:
            raise IncompatibleExecutor(f"the executor's {name} is over {MAX_FILE_BYTES} bytes")
        if chunk.sha256:
            if hashlib.sha256(content).hexdigest() != chunk.sha256:
                raise IncompatibleExecutor(
                    f"the executor's {name} does not match its checksum: the transfer was damaged"
                )
            (folder / name).write_bytes(content)
            name, content = "", bytearray()
    if name:
        raise IncompatibleExecutor(f"the executor sent {name} without its end")
