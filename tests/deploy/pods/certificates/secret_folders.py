"""Folders that hold a Secret's files as a kubelet lays them out, and changes them."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

DATA = "..data"
"""Link to the folder with the present files; all of them change with it."""
_versions = itertools.count(1)


def write_secrets(files: Mapping[str, bytes], folder: Path) -> None:
    """
    Write the files of Secrets, over those that are there; the pods' user may read them.

    As in a volume of a kubelet, FOLDER/KEY is a link to ..data/KEY, and ..data one to a folder that
    never changes: readers see all files of one Secret of before, or all of after.

    Args:
        files: Content of each file, by FOLDER/KEY.
        folder: Folder of the folders of Secrets.
    """
    secrets: dict[str, dict[str, bytes]] = {}
    for path, content in files.items():
        parent, name = PurePosixPath(path).parent, PurePosixPath(path).name
        secrets.setdefault(str(parent), {})[name] = content
    for name, content in secrets.items():
        _write(folder / name, content)


def _write(folder: Path, content: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    data = folder / DATA
    before = data.resolve() if data.is_symlink() else None
    version = folder / f"..version-{next(_versions)}"
    version.mkdir()
    version.chmod(0o755)
    for key, text in content.items():
        (version / key).write_bytes(text)
        (version / key).chmod(0o644)
    link = folder / "..data_tmp"
    link.symlink_to(version.name)
    link.replace(data)
    for key in content:
        if not (folder / key).is_symlink():
            (folder / key).symlink_to(f"{DATA}/{key}")
    if before is not None:
        for gone in {one.name for one in before.iterdir()} - content.keys():
            (folder / gone).unlink()
        shutil.rmtree(before)
