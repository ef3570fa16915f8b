"""Folder for sockets and files that live as long as a process."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tandem.errors import InvalidConfig
from tandem.network.listen_address import MAX_UNIX_PATH_BYTES

MIN_FREE_BYTES = 16 << 20
"""Least free space of a place: tokenizers of models take up to this, and logs little."""
_ALWAYS_SHORT = ("/tmp", "/var/tmp")  # noqa: S108  # folders are made below them, by mkdtemp


def temporary_folder(prefix: str, deepest: str) -> Path:
    """
    Make a folder that only this user can read: in TMPDIR, or in /tmp or /var/tmp if TMPDIR is full
    or its path too long.

    Args:
        prefix: Prefix of the folder's name.
        deepest: Longest path of a socket below the folder.

    Raises:
        InvalidConfig: No place can be used; the text says why for each.
    """
    wrong = []
    for place in _places():
        # mkdtemp adds eight characters, and a slash goes before each part.
        path_bytes = len(os.fsencode(place / f"{prefix}12345678" / deepest))
        try:
            if path_bytes > MAX_UNIX_PATH_BYTES:
                wrong.append(f"the path of {place} is too long for a unix socket")
            elif shutil.disk_usage(place).free < MIN_FREE_BYTES:
                wrong.append(f"{place} has less than {MIN_FREE_BYTES >> 20} MiB of room")
            else:
                return Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE}:
                raise
            wrong.append(f"{place}: {error.strerror}")
    raise InvalidConfig(
        f"no place for temporary files: {'; '.join(wrong)}: set TMPDIR to a folder with room and a "
        "short path"
    )


def _places() -> Iterator[Path]:
    try:
        first = [tempfile.gettempdir()]
    except FileNotFoundError:  # no usual place can be written to
        first = [os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if name in os.environ]
    yield from (Path(name) for name in dict.fromkeys([*first, *_ALWAYS_SHORT]))
