"""Wheels that hold metadata alone, so that resolving and installing can be tried without a network."""

from __future__ import annotations

import zipfile
from pathlib import Path

LINUX = ("py3-none-manylinux_2_28_x86_64", "py3-none-manylinux_2_28_aarch64")
EVERYWHERE = ("py3-none-any",)


def write_wheel(folder, name, version, *, requires=(), tags=EVERYWHERE):
    """Write one wheel for each tag into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {one}\n" for one in requires)
    for tag in tags:
        files = {
            f"{name}.py": f"version = {version!r}\n",
            f"{info}/METADATA": metadata,
            f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: {tag}\n",
        }
        files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
        with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as wheel:
            for path, text in files.items():
                wheel.writestr(path, text)


def write_index(folder, name):
    """Make a folder of one package's wheels an index, and return its address."""
    links = "".join(
        f'<a href="{wheel.name.replace("+", "%2B")}">{wheel.name}</a>\n'
        for wheel in sorted((folder / name).glob("*.whl"))
    )
    (folder / name / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    return Path(folder).as_uri()
