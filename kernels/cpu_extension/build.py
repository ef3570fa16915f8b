"""
Compiles the library, and finds it again.

A built library is kept in the cache directory, `TANDEM_CACHE_DIR` or else `~/.cache/tandem`, under
a name made of a digest of all that its code depends on and a digest of its own bytes. Files appear
by rename, so that any number of processes may build and read at once; a lock keeps them from
compiling the same library twice. The directory must be writable only by users that may run code as
this user.

No wheel carries the library (scikit-build-core could): it is compiled for the processor that runs
it (-march=native) and linked to the OpenMP that the installed PyTorch has loaded, neither of which
is known where wheels are built. `torch.utils.cpp_extension.load` needs ninja, and keeps one library
per name, whichever processor of those that share a home compiled it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import structlog
import torch

from kernels.cpu_features import CPUINFO

COMPILE_TIMEOUT_S = 120.0
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-fvisibility=hidden"),
    *("-ffp-contract=fast", "-fno-math-errno"),
)
"""Compiler flags; none lets the compiler reorder sums, as bits must not depend on unrolling."""

_LOCK_TIMEOUT_S = COMPILE_TIMEOUT_S + 30.0
_POLL_S = 0.05
_SOURCES = Path(__file__).parent
_MAPS = Path("/proc/self/maps")

_log = structlog.get_logger(__name__)


class ExtensionUnavailable(RuntimeError):
    """The library of C++ kernels is not available on this machine; the message says why."""


def built_library(environ: Mapping[str, str] = os.environ) -> Path:
    """
    Return the path of the library for this machine, PyTorch and source; compile it if need be.

    A machine without a compiler uses a library that any compiler built.

    Args:
        environ: Environment; `TANDEM_CACHE_DIR`, `CXX` and `PATH` are read.

    Raises:
        ExtensionUnavailable: There is no compiler, it fails, or the directory cannot be written.
    """
    folder = cache_folder(environ)
    runtime = _openmp_runtime()
    key = _key(runtime)
    compiler = _find_compiler(environ)
    if compiler is None:
        found = _find_built(folder, f"{key}-*")
        if found is None:
            raise ExtensionUnavailable("there is no C++ compiler: neither $CXX nor g++ nor c++")
        return found
    name = f"{key}-{_digest(_run([compiler, '--version']).encode(), 8)}"
    found = _find_built(folder, name)
    if found is not None:
        return found
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(folder / f"{name}.lock"):
            return _find_built(folder, name) or _build(folder, name, compiler, runtime)
    except OSError as error:
        raise ExtensionUnavailable(f"cannot build into {folder}: {error}") from error


def cache_folder(environ: Mapping[str, str]) -> Path:
    """
    Return the folder of built libraries.

    Raises:
        ExtensionUnavailable: No directory is set, and the user has no home.
    """
    chosen = environ.get("TANDEM_CACHE_DIR")
    try:
        cache = Path(chosen) if chosen else Path.home() / ".cache" / "tandem"
    except RuntimeError as error:
        raise ExtensionUnavailable(f"no TANDEM_CACHE_DIR is set, and {error}") from error
    return cache / "cpu_extension"


def _build(folder: Path, name: str, compiler: str, runtime: Path) -> Path:
    _log.info("cpu_extension_building", compiler=compiler, takes="a minute or less, once")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder) as place:
        library = Path(place) / "library.so"
        sources = [path for path in _sources() if path.suffix == ".cpp"]
        units = [f"{place}/{_object_name(source)}" for source in sources]
        with ThreadPoolExecutor(os.cpu_count()) as compilers:
            commands = (
                [compiler, *FLAGS, "-I", str(_SOURCES), "-c", str(source), "-o", unit]
                for source, unit in zip(sources, units, strict=True)
            )
            list(compilers.map(_run, commands))
        # Link the same OpenMP library that PyTorch uses: a second one would bring threads of its
        # own, which compete with PyTorch's for the same cores.
        linked = ["-shared", *units, "-o", str(library), "-Wl,-z,defs", str(runtime)]
        _run([compiler, *linked, f"-Wl,-rpath,{runtime.parent}"])
        with library.open("rb") as built:
            os.fsync(built.fileno())
            digest = _digest(built.read(), 16)
        path = folder / f"{name}-{digest}.so"
        library.replace(path)
    seconds = round(time.monotonic() - started, 3)
    _log.info("cpu_extension_built", path=str(path), compiler=compiler, seconds=seconds)
    return path


def _find_built(folder: Path, name: str) -> Path | None:
    """Return the newest intact library of a name, which may hold a wildcard, or None."""
    try:
        built = sorted(folder.glob(f"{name}-*.so"), key=lambda path: path.stat().st_mtime)
        for path in reversed(built):
            if path.stem.rpartition("-")[2] == _digest(path.read_bytes(), 16):
                return path
            _log.warning("cpu_extension_damaged", path=str(path))
    except OSError as error:
        raise ExtensionUnavailable(f"cannot read {folder}: {error}") from error
    return None


def _find_compiler(environ: Mapping[str, str]) -> str | None:
    names = [environ["CXX"]] if environ.get("CXX") else ["g++", "c++"]
    path = environ.get("PATH", os.defpath)
    return next((found for name in names if (found := shutil.which(name, path=path))), None)


def _run(command: list[str]) -> str:
    """Run a compiler and return its standard output."""
    try:
        done = subprocess.run(  # noqa: S603  # the user's own compiler, no shell
            command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ExtensionUnavailable(f"{command[0]} did not run: {error}") from error
    if done.returncode != 0:
        said = " ".join(done.stderr.split())[-500:]
        raise ExtensionUnavailable(f"{command[0]} failed with {done.returncode}: {said}")
    return done.stdout


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file's lock; it ends with the process, so that none is left behind."""
    with path.open("a") as lock:
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while not _try_lock(lock):
            if time.monotonic() > deadline:
                raise ExtensionUnavailable(f"another process has held {path} for too long")
            time.sleep(_POLL_S)
        yield


def _try_lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _openmp_runtime() -> Path:
    """Return the GNU OpenMP library that PyTorch has loaded into this process."""
    if platform.system() != "Linux":
        raise ExtensionUnavailable(f"it is written for Linux, this is {platform.system()}")
    for line in _MAPS.read_text(encoding="utf-8").splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("libgomp"):
            return path
    raise ExtensionUnavailable("this PyTorch does not run on GNU OpenMP (libgomp)")


def _key(runtime: Path) -> str:
    """Return a digest of all that the code depends on, except for the compiler."""
    told = [str(path.relative_to(_SOURCES)).encode() + path.read_bytes() for path in _sources()]
    told += [flag.encode() for flag in FLAGS]
    told += [platform.machine().encode(), _cpu_features(), torch.__version__.encode()]
    told.append(str(runtime).encode())
    return _digest(b"\0".join(told), 16)


def _sources() -> list[Path]:
    """Return the C++ files of this folder and of those in it, in the order of their paths."""
    return sorted(path for path in _SOURCES.rglob("*") if path.suffix in {".cpp", ".h"})


def _object_name(source: Path) -> str:
    """Name the object file of a source by its whole path: folders may use the same file name."""
    return "-".join(source.relative_to(_SOURCES).with_suffix(".o").parts)


def _cpu_features() -> bytes:
    """Return the processor's features as the kernel lists them; -march=native follows them."""
    lines = CPUINFO.read_bytes().splitlines()
    kinds = (b"model name", b"flags", b"Features", b"CPU implementer", b"CPU part")
    return b"\n".join(sorted({line for line in lines if line.startswith(kinds)}))


def _digest(told: bytes, length: int) -> str:
    return hashlib.sha256(told).hexdigest()[:length]
