"""`deploy/local/setup`: it installs once, says what it does, and mends what went wrong before."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import signal
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.certificates import Authority, Pair
from tests.deploy.fake_wheels import write_index, write_wheel
from tests.e2e.cluster import ROOT, environment
from tests.waiting import LIMIT_S, wait_until

BACKEND = """
import base64, zipfile
def get_requires_for_build_editable(config_settings=None):
    return []
def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    info = "tandem_serve-1.dist-info"
    name = "tandem_serve-1-py3-none-any.whl"
    metadata = "Metadata-Version: 2.1\\nName: tandem-serve\\nVersion: 1\\nRequires-Dist: torch\\n"
    with zipfile.ZipFile(f"{wheel_directory}/{name}", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", metadata + "Provides-Extra: client\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""
SCRIPT = (
    '#!/usr/bin/env bash\nset -euo pipefail\nsource "$(dirname "$0")/setup"\ntandem_setup client\n'
)


class Project:
    """A tiny project with our scripts, that pip installs from folders alone."""

    def __init__(self, folder):
        self.root = folder / "project"
        shutil.copytree(ROOT / "deploy/local", self.root / "deploy/local")
        (self.root / "deploy/local/start").write_text(SCRIPT)
        (self.root / "deploy/local/start").chmod(0o755)
        (self.root / "deploy/local/constraints.txt").write_text("torch==2.13.0\n")
        (self.root / "backend.py").write_text(BACKEND)
        (self.root / "pyproject.toml").write_text(
            "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n"
            "[project]\nname = 'tandem-serve'\nversion = '1'\n"
        )
        self.wheels = folder / "wheels"
        write_wheel(self.wheels, "torch", "2.13.0", requires=["nvidia-cublas"])
        write_wheel(self.wheels, "nvidia_cublas", "13.1")

    def environment(self, **changes):
        own = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels)}
        return environment() | own | {"PIP_CONFIG_FILE": "/dev/null"} | changes

    def start(self, **changes):
        """Run the script to its end, and return what it said and its exit status."""
        outcome = subprocess.run(
            [str(self.root / "deploy/local/start")],
            env=self.environment(**changes),
            capture_output=True,
            text=True,
            check=False,
        )
        assert "" == outcome.stdout
        return outcome.stderr, outcome.returncode

    def torch(self):
        """Return the version of PyTorch in the environment."""
        (module,) = self.root.glob(".venv/lib/python*/site-packages/torch.py")
        return module.read_text().split("'")[1]


@contextlib.contextmanager
def served_encrypted(folder: Path, pair: Pair) -> Iterator[str]:
    """Serve the files of a folder over HTTPS; yields the address."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


@pytest.fixture
def install(monkeypatch, tmp_path):
    """The module that setup runs."""
    path = ROOT / "deploy/local/install.py"
    spec = importlib.util.spec_from_file_location("tandem_install", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
class TestInstallation:
    def test_first_run_says_what_it_does_and_a_broken_one_is_mended(self, project):
        """
        The first run says how much it downloads, the next is silent, and an environment in which
        pip was killed is made from nothing.
        """
        words, status = project.start()

        assert 0 == status, words
        assert "start: installing (once; later runs skip this)" in words
        assert "about 2.9 GB to download, 5.0 GB on the disk" in words
        assert Path("/dev/nvidiactl").exists() or "run TANDEM_TORCH_INDEX=URL" in words
        assert ("", 0) == project.start()

        (project.root / ".venv/.tandem-unfinished").touch()
        (stale,) = project.root.glob(".venv/lib/python*/site-packages/torch.py")
        stale.write_text("half a 'file'")
        words, status = project.start()

        assert (0, "2.13.0") == (status, project.torch()), words
        assert "its last installation did not end" in words

    def test_named_index_gives_pytorch_until_another_is_named(self, project, tmp_path):
        """
        TANDEM_TORCH_INDEX gives PyTorch alone; it is remembered, and a change installs anew.
        """
        write_wheel(tmp_path / "cpu/torch", "torch", "2.13.0+cpu")
        cpu = write_index(tmp_path / "cpu", "torch")

        words, status = project.start(TANDEM_TORCH_INDEX=cpu, PIP_NO_INDEX="0")
        assert (0, "2.13.0+cpu") == (status, project.torch()), words
        assert "about 0.3 GB to download" in words

        (project.root / "pyproject.toml").open("a").write("description = 'changed'\n")
        words, status = project.start(PIP_NO_INDEX="0")
        assert (0, "2.13.0+cpu") == (status, project.torch()), words

        words, status = project.start(TANDEM_TORCH_INDEX="")
        assert (0, "2.13.0") == (status, project.torch()), words
        assert "PyTorch is to come from another index" in words

    def test_unreachable_index_is_one_sentence(self, project):
        """
        Without a network there is one sentence that says so, and what was installed stays.
        """
        project.start()
        (project.root / "pyproject.toml").open("a").write("dependencies = ['absent']\n")
        (project.root / "backend.py").write_text(
            BACKEND.replace("Requires-Dist: torch", "Requires-Dist: absent")
        )
        nowhere = {"PIP_NO_INDEX": "0", "PIP_RETRIES": "1", "PIP_FIND_LINKS": ""}

        words, status = project.start(PIP_INDEX_URL="http://127.0.0.1:9", **nowhere)

        assert 1 == status
        assert words.splitlines()[-1].startswith("start: no package index could be reached")
        assert all(line.startswith("start: ") for line in words.splitlines())
        assert "2.13.0" == project.torch()
        assert not (project.root / ".venv/.tandem-unfinished").exists()

    def test_authority_that_the_system_trusts_is_enough(self, project, tmp_path):
        """
        An index whose certificate pip does not trust, and the system does, gives PyTorch, and other
        programs are told of the system's authorities; one that neither trusts is one sentence with
        the setting that mends it.
        """
        write_wheel(tmp_path / "own/torch", "torch", "2.13.0")
        write_index(tmp_path / "own", "torch")
        ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
        with served_encrypted(tmp_path / "own", ours.issue("index")) as address:
            index = {"PIP_NO_INDEX": "0", "PIP_FIND_LINKS": "", "PIP_CERT": ""}
            index |= {"REQUESTS_CA_BUNDLE": "", "CURL_CA_BUNDLE": ""}  # pip prefers them to its own
            index |= {"PIP_RETRIES": "0", "PIP_INDEX_URL": address, "no_proxy": "127.0.0.1"}
            words, status = project.start(**index, SSL_CERT_FILE=str(others.file))
            assert (1, True) == (status, "PIP_CERT" in words), words

            words, status = project.start(**index, SSL_CERT_FILE=str(ours.file))
            assert 0 == status, words
            assert "2.13.0" == project.torch()

            own = '\nprintf \'%s %s\' "$PIP_CERT" "$NODE_EXTRA_CA_CERTS" >&2\n'
            (project.root / "deploy/local/start").open("a").write(own)
            index["NODE_EXTRA_CA_CERTS"] = ""
            told = project.start(**index, SSL_CERT_FILE=str(ours.file))
            assert (f"{ours.file} {ours.file}", 0) == told

    def test_interrupt_leaves_no_traceback(self, project):
        """
        Ctrl-C during an installation ends it with 130 and a sentence.
        """
        begun = project.root / "begun"
        slow = f"\nimport pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(600)\n"
        (project.root / "backend.py").write_text(BACKEND + slow)
        process = subprocess.Popen(
            [str(project.root / "deploy/local/start")],
            env=project.environment(),
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        wait_until(begun.exists, "the installation's slow part")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, words = process.communicate(timeout=LIMIT_S)

        assert 130 == process.returncode
        assert "Traceback" not in words
        assert words.splitlines()[-1].startswith("start: stopped")


class TestFailure:
    def test_full_disk_is_named_with_what_is_free(self, install):
        """
        A full disk is one sentence with the room that there is.
        """
        words = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"

        assert install.failure(words).startswith("a disk is full (")

    def test_certificate_that_is_not_trusted_is_told_from_a_network_that_is_down(self, install):
        """
        A certificate without a known authority is one sentence with the setting that mends it.
        """
        words = "(Caused by SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]"

        assert "PIP_CERT" in install.failure(words)

    def test_other_failures_show_the_words_of_pip(self, install, capsys):
        """
        A failure of neither disk nor network shows pip's own words, without what went well.
        """
        sentence = install.failure("Collecting a\nERROR: No matching distribution found for b\n")

        assert sentence.startswith("pip could not install the project")
        assert "ERROR: No matching distribution found for b\n" == capsys.readouterr().err
