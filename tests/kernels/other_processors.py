"""The C++ library as a processor without this machine's instructions would have it compiled."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from kernels.cpu_extension import build, library
from kernels.cpu_features import cpu_has_any

OTHER_PROCESSORS = {
    "x86_64": ["x86-64", "x86-64-v3", *(["x86-64-v4"] if cpu_has_any("avx512f") else [])]
}.get(platform.machine(), [])
"""
Of this machine's kind, as far as it can run them: vectors of 4, of 8 and of 16 numbers, none of
which multiplies pairs of bfloat16.
"""


@contextmanager
def library_for(processor: str, operation: ModuleType, source: str, folder: Path) -> Iterator[None]:
    """
    Compile the library anew, of one operation alone, and let that operation use it meanwhile.

    Args:
        processor: As the compiler's `-march` names it.
        operation: The operation's module `cpu_extension`.
        source: Its file among the library's sources.
        folder: An empty folder for what is compiled.
    """
    for path in (build._SOURCES / source, *build._SOURCES.rglob("*.h")):
        copy = folder / path.relative_to(build._SOURCES)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(path, copy)
    flags = [flag for flag in build.FLAGS if not flag.startswith("-march")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_SOURCES", folder)
        patch.setattr(build, "FLAGS", (*flags, f"-march={processor}"))
        patch.setattr(library, "_loaded", [])
        operation._library.cache_clear()
        yield
    operation._library.cache_clear()
