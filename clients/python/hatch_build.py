"""
Adds to the distribution `tandem-client` the modules of the package `tandem` that the client
imports, and lets their generated code run with any protobuf and gRPC of the declared ranges.

protoc's Python code checks that the runtime is as new as protoc, and of its major version or the
next one. All else in it is a serialized descriptor and calls that protobuf has had since 5.26, so
the check is left out, and pyproject.toml declares the range instead. A test runs the client with
the oldest versions.
"""

from __future__ import annotations

import ast
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

OLDEST_GRPC = "1.64.0"
"""Oldest gRPC that pyproject.toml allows; generated stubs check for it."""

_PROTOBUF_CHECK = re.compile(
    r"_runtime_version\.ValidateProtobufRuntimeVersion\(.*?\n\)\n", re.DOTALL
)
_PROTOBUF_IMPORT = "from google.protobuf import runtime_version as _runtime_version\n"
_GRPC_VERSION = re.compile(r"^GRPC_GENERATED_VERSION = '.*'$", re.MULTILINE)


class SharedModules(BuildHookInterface):
    """Adds the shared modules; a source distribution has them in its folder `tandem`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the modules to a temporary folder, and have the builder take them from there."""
        del version
        root = Path(self.root)
        packed = root / "tandem"
        if packed.is_dir():
            build_data["force_include"][str(packed)] = "tandem"
            return
        repository = root.parents[1]
        shared = repository / "protos" / "python"
        self._folder = tempfile.mkdtemp(prefix="tandem-client-")
        target = Path(self._folder)
        for path in sorted(needed_files(root / "tandem_client", shared)):
            copy = target / path.relative_to(shared)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(portable(path), encoding="utf-8")
        build_data["force_include"][str(target / "tandem")] = "tandem"
        build_data["force_include"][str(repository / "LICENSE")] = (
            "LICENSE" if self.target_name == "sdist" else "tandem_client/LICENSE"
        )

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder."""
        del version, build_data, artifact_path
        shutil.rmtree(getattr(self, "_folder", ""), ignore_errors=True)


def needed_files(client: Path, shared: Path) -> set[Path]:
    """
    Return the files of `tandem` that the client needs: the modules that it imports, in functions
    too, those that these import, their type stubs, and the data beside them.

    Args:
        client: Folder of the package `tandem_client`.
        shared: Folder that holds the package `tandem`.
    """
    found: set[Path] = set()
    todo = list(client.rglob("*.py"))
    while todo:
        for name in _imports(todo.pop()):
            path = _file_of(name, shared)
            if path is not None and path not in found:
                found.add(path)
                todo.append(path)
    packages = {folder / "__init__.py" for path in found for folder in path.parents}
    found |= {path for path in packages if shared in path.parents and path.is_file()}
    data = {one for path in found for one in path.parent.glob("*.json")}
    stubs = {path.with_suffix(".pyi") for path in found}
    return found | data | {path for path in stubs if path.is_file()} | {shared / "tandem/py.typed"}


def portable(path: Path) -> str:
    """
    Return the text of a module, that of generated code without its checks of versions.

    Raises:
        ValueError: The generated code is not as this function knows it.
    """
    text = path.read_text(encoding="utf-8")
    if path.name.endswith("_pb2.py"):
        text, num_checks = _PROTOBUF_CHECK.subn("", text)
        if num_checks != 1 or _PROTOBUF_IMPORT not in text:
            raise ValueError(f"{path} has not the one check of protobuf's version")
        return text.replace(_PROTOBUF_IMPORT, "")
    if path.name.endswith("_pb2_grpc.py"):
        text, num_checks = _GRPC_VERSION.subn(f"GRPC_GENERATED_VERSION = '{OLDEST_GRPC}'", text)
        if num_checks != 1:
            raise ValueError(f"{path} has not the one check of gRPC's version")
    return text


def _imports(path: Path) -> Iterator[str]:
    """Yield the names of modules of `tandem` that a file may import."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
        yield from (name for name in names if name.partition(".")[0] == "tandem")


def _file_of(module: str, shared: Path) -> Path | None:
    """Return the file of a module, or None if the name is none of a module."""
    path = shared.joinpath(*module.split("."))
    candidates = (path / "__init__.py", path.with_name(f"{path.name}.py"))
    return next((one for one in candidates if one.is_file()), None)
