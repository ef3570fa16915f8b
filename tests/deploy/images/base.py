"""
Base image of Debian's own packages, for machines that reach no registry: `python -m
tests.deploy.images.base`.

Debian's Python stands where python:3.13-slim-bookworm has one that its maintainers built.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.deploy.images.podman import missing_programs

NAME = "localhost/tandem-base:bookworm"
RELEASE = "bookworm"
PACKAGES = ("python3", "python3-pip", "ca-certificates")
SOURCES = (Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*")))
MIRROR = re.compile(r"^(?:URIs:|deb(?: \[[^]]*\])?)\s+(https?://\S+)", re.MULTILINE)
EXIT_UNAVAILABLE = 69


class NoBase(Exception):
    """The base image cannot be made here; the text says why."""


def mirror() -> str:
    """
    Return the first mirror of Debian that apt uses here.

    Raises:
        NoBase: There is none.
    """
    for path in SOURCES:
        if path.is_file() and (found := MIRROR.search(path.read_text())):
            return found[1]
    raise NoBase("no mirror of Debian in apt's sources of this machine")


def make() -> str:
    """
    Make the image, unless it is there, and return its name.

    Raises:
        NoBase: A tool or a mirror is missing, or a command failed.
    """
    if missing := missing_programs("buildah", "mmdebstrap"):
        raise NoBase(f"missing, by the names of Debian's packages: {' '.join(missing)}")
    if subprocess.run(
        ["buildah", "inspect", "--type=image", NAME], capture_output=True, check=False
    ).returncode:
        with tempfile.TemporaryDirectory(prefix="tandem-base-") as folder:
            root = Path(folder) / "root.tar"
            include = f"--include={','.join(PACKAGES)}"
            run("mmdebstrap", "--variant=minbase", include, RELEASE, str(root), mirror())
            container = run("buildah", "from", "scratch")
            try:
                run("buildah", "add", "--quiet", container, str(root), "/")
                run("buildah", "config", "--cmd=python3", container)
                run("buildah", "commit", "--quiet", container, NAME)
            finally:
                run("buildah", "rm", container)
    return NAME


def run(*command: str) -> str:
    """
    Run a command to its end, and return what it printed.

    Raises:
        NoBase: It failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoBase(f"{' '.join(command)}: exit {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout.strip()


def main() -> int:
    """Make the image and print its name."""
    try:
        print(make())
    except NoBase as error:
        sys.stderr.write(f"base: NOTHING WAS MADE: {error}\n")
        return EXIT_UNAVAILABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
