"""
Build the container images of this checkout: `python deploy/images/build.py [IMAGE...]`.

It takes buildah, podman or docker, the first that is there. Packages come through pip's own
configuration on this machine (pip.conf and the PIP_ variables), which stages of the build see as
secrets, so that no image keeps it.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
IMAGES = ("scheduler", "executor", "gateway")
PROGRAMS: dict[str, tuple[str, ...]] = {
    "buildah": ("build", "--layers"),
    "podman": ("build",),
    "docker": ("build",),
}
"""Programs that build, in order of preference, each with its command."""
EXTRAS = {"cpu": "executor", "gpu": "executor,gpu"}
"""Extras of pyproject.toml in the executor's image, by variant."""
SUFFIXES = {"cpu": "", "gpu": "-gpu"}
"""End of the executor's default tag, by variant."""
OWN_FILES = ("cert", "client-cert", "find-links", "cache-dir", "log")
"""Settings of pip that are paths of this machine, which a stage of the build does not have."""
EXIT_UNAVAILABLE = 69


class BuildError(Exception):
    """Error of a build; the text is a sentence that says why, and what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the images asked for, print their names, and return the exit code."""
    chosen = parse(arguments)
    try:
        program = find_program(chosen.program)
        with tempfile.TemporaryDirectory(prefix="tandem-images-") as folder:
            secrets = write_secrets(Path(folder), pip_settings())
            for image in chosen.images or IMAGES:
                name = f"{chosen.prefix}{image}:{chosen.tag or default_tag(image, chosen.variant)}"
                run(build_command(program, image, name, chosen, secrets), name)
                print(name)
    except BuildError as error:
        sys.stderr.write(f"build.py: {error}\n")
        return EXIT_UNAVAILABLE if isinstance(error, NoProgram) else 1
    return 0


class NoProgram(BuildError):
    """Error of a machine without a program that builds images."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="build.py", description="Builds Tandem's images.")
    parser.add_argument("images", nargs="*", metavar="IMAGE", help=f"of {', '.join(IMAGES)}; all")
    parser.add_argument("--program", choices=PROGRAMS, help="default: the first that is there")
    parser.add_argument("--base", help="base image with Python; default: that of the Containerfile")
    parser.add_argument(
        "--variant", choices=EXTRAS, default="cpu", help="of the executor (default: cpu)"
    )
    parser.add_argument(
        "--torch-index",
        default=os.environ.get("TANDEM_TORCH_INDEX", ""),
        metavar="URL",
        help="package index of PyTorch; default: TANDEM_TORCH_INDEX, else pip's own",
    )
    parser.add_argument("--prefix", default="localhost/tandem-", help="before an image's name")
    parser.add_argument(
        "--tag", help="default: the version of pyproject.toml, with -gpu for that variant"
    )
    chosen = parser.parse_args(arguments)
    for image in chosen.images:
        if image not in IMAGES:
            parser.error(f"there is no image {image!r}, only {', '.join(IMAGES)}")
    return chosen


def default_tag(image: str, variant: str) -> str:
    """Return the tag of an image where none is given; variants of one image have different ones."""
    return version() + (SUFFIXES[variant] if image == "executor" else "")


def find_program(wanted: str | None) -> str:
    """
    Return the program that builds.

    Raises:
        NoProgram: It is not on the PATH.
    """
    for name in [wanted] if wanted else PROGRAMS:
        if shutil.which(name):
            return name
    missing = wanted or ", ".join(PROGRAMS)
    raise NoProgram(
        f"NOTHING WAS BUILT: a program that builds images is needed and not on the PATH: {missing}"
    )


def build_command(
    program: str,
    image: str,
    name: str,
    chosen: argparse.Namespace,
    secrets: Mapping[str, Path],
) -> list[str]:
    """
    Return the command that builds one image.

    Args:
        program: One of PROGRAMS.
        image: One of IMAGES.
        name: Name and tag of what is built.
        chosen: Options of the command line.
        secrets: Files that stages of the build may read, by name.
    """
    values = {"VERSION": version(), "REVISION": revision()}
    if chosen.base:
        values["BASE"] = chosen.base
    if image == "executor":
        values |= {"EXTRAS": EXTRAS[chosen.variant], "TORCH_INDEX": chosen.torch_index}
    command = [program, *PROGRAMS[program], f"--file={HERE / f'Containerfile.{image}'}"]
    command += [f"--build-arg={key}={value}" for key, value in values.items()]
    command += [f"--secret=id={key},src={path}" for key, path in secrets.items()]
    return [*command, f"--tag={name}", str(ROOT)]


def run(command: Sequence[str], name: str) -> None:
    """
    Run a command that builds the image of this name.

    Raises:
        BuildError: It failed.
    """
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise BuildError(f"{command[0]} could not build {name}; the lines above say why")


def pip_settings() -> dict[str, str]:
    """
    Return pip's settings on this machine, files and environment together, by their long names.

    Raises:
        BuildError: This interpreter has no pip.
    """
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    if listed.returncode:
        raise BuildError(f"{sys.executable} has no pip, whose configuration the build follows")
    return parse_settings(listed.stdout)


def parse_settings(listed: str) -> dict[str, str]:
    """
    Return what `pip config list` printed; the environment wins over files, as it does in pip.

    Args:
        listed: Lines such as `global.timeout='60'` and `:env:.timeout='60'`.
    """
    files: dict[str, str] = {}
    environment: dict[str, str] = {}
    for line in listed.splitlines():
        key, separator, text = line.partition("=")
        section, _, name = key.rpartition(".")
        if separator and section in {"global", "install", ":env:"}:
            place = environment if section == ":env:" else files
            place[name] = str(ast.literal_eval(text))
    return files | environment


def write_secrets(folder: Path, settings: Mapping[str, str]) -> dict[str, Path]:
    """
    Write pip's settings and the certificates that it trusts to files, and return them by name.

    Raises:
        BuildError: The certificates cannot be read.
    """
    lines = [
        f"{name} = {text}".replace("\n", "\n  ")
        for name, text in settings.items()
        if name not in OWN_FILES
    ]
    secrets = {"pip-config": folder / "pip.conf"}
    secrets["pip-config"].write_text("\n".join(["[global]", *lines, ""]))
    if cert := settings.get("cert"):
        secrets["ca-bundle"] = folder / "ca-bundle.pem"
        try:
            secrets["ca-bundle"].write_bytes(Path(cert).read_bytes())
        except OSError as error:
            raise BuildError(f"pip's setting cert: {cert}: {error.strerror}") from error
    return secrets


def version() -> str:
    """Return the version of this checkout."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def revision() -> str:
    """Return the commit of this checkout, or `unknown` where there is no git."""
    try:
        told = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return told.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
