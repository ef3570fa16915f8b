"""Images of the cluster's runtime: those of Tandem from podman, and small ones of single programs."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import subprocess
import tarfile
from pathlib import Path

PROCESSORS = {"x86_64": "amd64", "aarch64": "arm64"}
TANDEM = ("localhost/tandem-scheduler:0.2.0", "localhost/tandem-executor:0.2.0")
PAUSE = "localhost/cluster-pause:1"
COREDNS = "localhost/cluster-coredns:1"
POLICIES = "localhost/cluster-policies:1"


class ImageError(Exception):
    """An image that is not there, or cannot be read, with what the program said."""


def archive(image: str, program: Path) -> bytes:
    """
    Return an image of one program without libraries, as `docker save` writes it.

    Args:
        image: Name and tag.
        program: The program, which is the image's entrypoint.
    """
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as files:
        content = program.read_bytes()
        entry = tarfile.TarInfo(program.name)
        entry.size = len(content)
        entry.mode = 0o755
        files.addfile(entry, io.BytesIO(content))
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    config = json.dumps(
        {
            "architecture": PROCESSORS[platform.machine()],
            "os": "linux",
            "config": {"Entrypoint": [f"/{program.name}"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
    ).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [image], "Layers": [f"{digest}/layer.tar"]}]
    parts = {
        config_name: config,
        f"{digest}/layer.tar": layer.getvalue(),
        "manifest.json": json.dumps(manifest).encode(),
    }
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as files:
        for name, part in parts.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(part)
            files.addfile(entry, io.BytesIO(part))
    return whole.getvalue()


class Runtime:
    """The images of a containerd that runs."""

    def __init__(self, socket: Path, marks: Path) -> None:
        """
        Args:
            socket: Where containerd listens.
            marks: Folder that lives as long as containerd's images, for notes of what it has.
        """
        self._ctr = ["ctr", f"--address={socket}", "--namespace=k8s.io"]
        self._marks = marks
        marks.mkdir(exist_ok=True)

    def add_program(self, image: str, program: Path) -> None:
        """Add an image of one program."""
        self._finish(["images", "import", "-"], archive(image, program))

    def add_from_podman(self, image: str) -> None:
        """
        Add an image that podman has, unless this runtime has the same already.

        Raises:
            ImageError: podman has no such image, or it cannot be read.
        """
        asked = subprocess.run(
            ["podman", "image", "inspect", "--format={{.Id}}", image],
            capture_output=True,
            text=True,
            check=False,
        )
        if asked.returncode:
            raise ImageError(f"podman has no {image}: build it with deploy/images/build.py")
        mark = self._marks / image.replace("/", "_")
        if mark.exists() and mark.read_text() == asked.stdout:
            return
        with subprocess.Popen(["podman", "save", image], stdout=subprocess.PIPE) as saving:
            done = subprocess.run(
                [*self._ctr, "images", "import", "-"],
                stdin=saving.stdout,
                capture_output=True,
                text=True,
                check=False,
            )
        if saving.returncode or done.returncode:
            raise ImageError(f"{image} does not come from podman: {done.stderr.strip()}")
        mark.write_text(asked.stdout)

    def kill(self, container: str) -> None:
        """Kill the first process of a container (SIGKILL)."""
        self._finish(["tasks", "kill", "--signal=SIGKILL", container])

    def pause(self, container: str) -> None:
        """Let all processes of a container stand still."""
        self._finish(["tasks", "pause", container])

    def _finish(self, arguments: list[str], content: bytes = b"") -> None:
        done = subprocess.run(
            [*self._ctr, *arguments], input=content, capture_output=True, check=False
        )
        if done.returncode:
            raise ImageError(f"ctr {' '.join(arguments)}: {done.stderr.decode().strip()}")
