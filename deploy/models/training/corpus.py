"""
The training text: Python files of the interpreter and of permissively licensed packages.

All files are read from the packages installed on this machine, so there is no download, and only
the names and hashes of the held-out files are committed. The order of files, the filters and the
held-out split depend only on paths and contents.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_PERCENT = 2
MAX_FILE_BYTES = 300_000
MAX_LINE_CHARS = 400
MAX_DIGIT_FRACTION = 0.10
NEAR_LINE_CHARS = 30
NEAR_LINES = 10
NEAR_FRACTION = 0.5
SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "_distutils",
        "_vendor",
        "artifacts",
        "idle_test",
        "lib2to3",
        "site-packages",
        "test",
        "testing",
        "tests",
    }
)
_LICENCE_WORDS = re.compile(r"copyright|licen[cs]e", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """
    One installed origin of files.

    Attributes:
        distribution: Name on the package index; ``python`` is the standard library.
        package: Import name of the folder to read.
        licence: SPDX expression of the distribution.
        is_measured: True if some of its files are held out; otherwise all may be trained on.
        skipped: Folders left out besides ``SKIPPED_FOLDERS``, and files by their path in the
            package, such as files that declare content under another licence.
    """

    distribution: str
    package: str
    licence: str
    is_measured: bool = True
    skipped: frozenset[str] = frozenset()


SOURCES = (
    Source(distribution="python", package="stdlib", licence="PSF-2.0"),
    Source(distribution="numpy", package="numpy", licence="BSD-3-Clause"),
    Source(distribution="torch", package="torch", licence="BSD-3-Clause"),
    Source(distribution="torch", package="torchgen", licence="BSD-3-Clause"),
    Source(distribution="torch", package="functorch", licence="BSD-3-Clause"),
    Source(distribution="sympy", package="sympy", licence="BSD-3-Clause"),
    Source(distribution="mpmath", package="mpmath", licence="BSD-3-Clause"),
    Source(
        distribution="networkx",
        package="networkx",
        licence="BSD-3-Clause",
        skipped=frozenset({"algorithms/bipartite/matching.py"}),
    ),
    Source(distribution="pip", package="pip", licence="MIT"),
    Source(distribution="setuptools", package="setuptools", licence="MIT"),
    Source(distribution="huggingface_hub", package="huggingface_hub", licence="Apache-2.0"),
    Source(distribution="fsspec", package="fsspec", licence="BSD-3-Clause"),
    Source(distribution="filelock", package="filelock", licence="MIT"),
    Source(distribution="anyio", package="anyio", licence="MIT"),
    Source(distribution="Jinja2", package="jinja2", licence="BSD-3-Clause"),
    Source(distribution="packaging", package="packaging", licence="Apache-2.0 OR BSD-2-Clause"),
    Source(distribution="click", package="click", licence="BSD-3-Clause"),
    Source(distribution="httpx2", package="httpx2", licence="BSD-3-Clause"),
    Source(distribution="httpcore2", package="httpcore2", licence="BSD-3-Clause"),
    Source(distribution="h11", package="h11", licence="MIT"),
    Source(distribution="PyYAML", package="yaml", licence="MIT"),
    Source(distribution="sortedcontainers", package="sortedcontainers", licence="Apache-2.0"),
    Source(
        distribution="transformers",
        package="transformers",
        licence="Apache-2.0",
        is_measured=False,
        skipped=frozenset({"models"}),
    ),
    Source(
        distribution="matplotlib",
        package="matplotlib",
        licence="LicenseRef-Matplotlib",
        is_measured=False,
    ),
    Source(distribution="mypy", package="mypy", licence="MIT", is_measured=False),
    Source(distribution="mypy", package="mypyc", licence="MIT", is_measured=False),
    Source(
        distribution="fonttools",
        package="fontTools",
        licence="MIT AND Apache-2.0 AND BSD-3-Clause",
        is_measured=False,
    ),
    Source(distribution="pydantic", package="pydantic", licence="MIT", is_measured=False),
    Source(distribution="pytest", package="_pytest", licence="MIT", is_measured=False),
    Source(distribution="rich", package="rich", licence="MIT", is_measured=False),
    Source(
        distribution="Pygments",
        package="pygments",
        licence="BSD-2-Clause",
        is_measured=False,
        skipped=frozenset({"lexers", "styles"}),
    ),
    Source(distribution="pillow", package="PIL", licence="MIT-CMU", is_measured=False),
    Source(distribution="triton", package="triton", licence="MIT", is_measured=False),
    Source(distribution="grpcio", package="grpc", licence="Apache-2.0", is_measured=False),
    Source(
        distribution="protobuf",
        package="google.protobuf",
        licence="BSD-3-Clause",
        is_measured=False,
    ),
    Source(distribution="poethepoet", package="poethepoet", licence="MIT", is_measured=False),
    Source(distribution="pyparsing", package="pyparsing", licence="MIT", is_measured=False),
    Source(
        distribution="typer", package="typer", licence="MIT AND BSD-3-Clause", is_measured=False
    ),
    Source(
        distribution="pyzmq",
        package="zmq",
        licence="BSD-3-Clause",
        is_measured=False,
        skipped=frozenset({"log", "ssh"}),
    ),
    Source(distribution="psutil", package="psutil", licence="BSD-3-Clause", is_measured=False),
    Source(
        distribution="python-dateutil",
        package="dateutil",
        licence="BSD-3-Clause",
        is_measured=False,
    ),
    Source(distribution="markdown-it-py", package="markdown_it", licence="MIT", is_measured=False),
    Source(
        distribution="structlog",
        package="structlog",
        licence="MIT OR Apache-2.0",
        is_measured=False,
    ),
    Source(
        distribution="prometheus_client",
        package="prometheus_client",
        licence="Apache-2.0 AND BSD-2-Clause",
        is_measured=False,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    r"""
    One file kept for training or held out.

    Attributes:
        source: ``Source.package`` of the file's origin.
        name: ``package/relative/path.py`` with forward slashes.
        text: Contents, newlines as ``\n``, without a leading licence comment.
        is_held_out: True if the file is never seen in training.
    """

    source: str
    name: str
    text: str
    is_held_out: bool


def collect() -> list[SourceFile]:
    """
    Read every source, filter, and drop repeated contents.

    Returns:
        Files ordered by source as listed above, then by name. A text that occurs twice is
        kept once, under the first name in that order; near copies of held-out files are
        left out of training.

    Raises:
        ModuleNotFoundError: A listed package is not installed.
    """
    seen: set[str] = set()
    files = []
    for source in SOURCES:
        root = _root(source)
        for path in sorted(root.rglob("*.py"), key=lambda found: found.as_posix()):
            relative = path.relative_to(root)
            if (SKIPPED_FOLDERS | source.skipped) & {*relative.parts[:-1], relative.as_posix()}:
                continue
            text = try_read(path)
            if text is None:
                continue
            key = hashlib.sha256("".join(text.split()).encode()).hexdigest()
            if key in seen:
                continue
            seen.add(key)
            name = f"{source.package}/{relative.as_posix()}"
            files.append(
                SourceFile(
                    source=source.package,
                    name=name,
                    text=text,
                    is_held_out=source.is_measured and is_held_out(name),
                )
            )
    return without_near_copies(files)


def without_near_copies(files: list[SourceFile]) -> list[SourceFile]:
    """
    Drop training files that share much of their text with one held-out file.

    Distinct stripped lines of at least ``NEAR_LINE_CHARS`` characters are compared. A file is
    dropped if it shares at least ``NEAR_LINES`` of them with one held-out file and these are at
    least ``NEAR_FRACTION`` of the lines of one of the two files.
    """
    held_lines = {file.name: _long_lines(file.text) for file in files if file.is_held_out}
    holders: dict[str, list[str]] = {}
    for name, lines in held_lines.items():
        for line in lines:
            holders.setdefault(line, []).append(name)
    kept = []
    for file in files:
        if not file.is_held_out:
            lines = _long_lines(file.text)
            shared = Counter(name for line in lines for name in holders.get(line, ()))
            if any(
                count >= NEAR_LINES
                and count >= NEAR_FRACTION * min(len(lines), len(held_lines[name]))
                for name, count in shared.items()
            ):
                continue
        kept.append(file)
    return kept


def read_named(digests: dict[str, str]) -> list[SourceFile]:
    """
    Read the held-out files that a manifest names.

    Args:
        digests: Digest of each text by ``SourceFile.name``, as in the manifest.

    Raises:
        ValueError: A file is missing or differs, so another version is installed.
    """
    roots = {source.package: _root(source) for source in SOURCES}
    files = []
    for name, digest in digests.items():
        package, _, relative = name.partition("/")
        path = roots[package] / relative
        text = try_read(path) if path.exists() else None
        if text is None or text_digest(text) != digest:
            raise ValueError(f"held-out file is missing or differs: {name}")
        files.append(SourceFile(source=package, name=name, text=text, is_held_out=True))
    return files


def is_held_out(name: str) -> bool:
    """Return True if a file belongs to the held-out split, by the hash of its name alone."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < HELD_OUT_PERCENT


def try_read(path: Path) -> str | None:
    """Return the cleaned text of a file, or None if it is not ordinary Python code."""
    if path.stat().st_size > MAX_FILE_BYTES:
        return None
    try:
        text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError):
        return None
    text = without_licence_comment(text)
    if len(text) < 100 or max(map(len, text.split("\n"))) > MAX_LINE_CHARS:
        return None
    digits = sum(map(str.isdigit, text))
    return None if digits > MAX_DIGIT_FRACTION * len(text) else text


def without_licence_comment(text: str) -> str:
    """Drop the comment lines that open a file when they name a licence or a copyright."""
    lines = text.split("\n")
    end = 0
    while end < len(lines) and (lines[end].startswith("#") or not lines[end].strip()):
        end += 1
    if _LICENCE_WORDS.search("\n".join(lines[:end])):
        return "\n".join(lines[end:])
    return text.lstrip("\n")


def write_manifest(files: list[SourceFile], path: Path) -> None:
    """Write versions, totals and the held-out names with their sha256 as JSON."""
    totals = {}
    for source in SOURCES:
        kept = [file for file in files if file.source == source.package]
        train = [file for file in kept if not file.is_held_out]
        totals[source.package] = {
            "version": _version(source),
            "licence": source.licence,
            "train_files": len(train),
            "train_bytes": sum(len(file.text.encode()) for file in train),
            "held_out_files": len(kept) - len(train),
            "held_out_bytes": sum(len(file.text.encode()) for file in kept if file.is_held_out),
        }
    held_out = {file.name: text_digest(file.text) for file in files if file.is_held_out}
    manifest = {"sources": totals, "held_out": held_out}
    path.write_text(json.dumps(manifest, indent=1, ensure_ascii=True) + "\n")


def text_digest(text: str) -> str:
    """Return the sha256 of a cleaned text as 64 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def documents(files: list[SourceFile], *, held_out: bool) -> Iterator[str]:
    """Yield the texts of one split in collection order."""
    return (file.text for file in files if file.is_held_out is held_out)


def _long_lines(text: str) -> set[str]:
    stripped = map(str.strip, text.split("\n"))
    return {line for line in stripped if len(line) >= NEAR_LINE_CHARS}


def _root(source: Source) -> Path:
    if source.package == "stdlib":
        return Path(sysconfig.get_paths()["stdlib"])
    spec = importlib.util.find_spec(source.package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(source.package)
    return Path(next(iter(spec.submodule_search_locations)))


def _version(source: Source) -> str:
    if source.package == "stdlib":
        return platform.python_version()
    return importlib.metadata.version(source.distribution)
