"""Compilation of the reader from the C files in this folder, once per version of them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror")
_SOURCES = Path(__file__).parent


class NoCompiler(Exception):
    """There is no C compiler, or it failed; the text says which."""


def compiled_reader(cache: Path | None = None) -> Path:
    """
    Return the path of the program; compile it if it does not exist.

    Args:
        cache: Directory of the program; by default `tandem` in $XDG_CACHE_HOME or ~/.cache.

    Raises:
        NoCompiler: $CC, or else `cc`, does not exist or fails, or the cache cannot be written.
    """
    sources = sorted(_SOURCES.glob("*.c"))
    headers = sorted(_SOURCES.glob("*.h"))
    version = hashlib.sha256(b"\0".join(path.read_bytes() for path in (*sources, *headers)))
    version.update(" ".join(FLAGS).encode())
    folder = _cache_folder() if cache is None else cache
    program = folder / f"stream-reader-{version.hexdigest()[:16]}"
    if not program.exists():
        _compile(sources, program)
    return program


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"


def _compile(sources: list[Path], program: Path) -> None:
    name = os.environ.get("CC") or "cc"
    compiler = shutil.which(name)
    if compiler is None:
        raise NoCompiler(f"there is no C compiler {name!r} on the PATH")
    try:
        program.parent.mkdir(parents=True, exist_ok=True)
        # Compiled aside and moved, so that of two first uses at once none runs half a program.
        with tempfile.TemporaryDirectory(dir=program.parent) as folder:
            made = Path(folder) / program.name
            done = subprocess.run(  # noqa: S603  # our own sources, the user's own compiler
                [compiler, *FLAGS, "-o", str(made), *map(str, sources)],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise NoCompiler(f"{compiler} ended with {done.returncode}: {done.stderr[:500]}")
            made.replace(program)
    except OSError as error:
        raise NoCompiler(f"{program.parent}: {error.strerror or error}") from error
