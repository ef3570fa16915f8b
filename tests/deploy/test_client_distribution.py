"""
The distribution `tandem-client`: it is built, installed beside the oldest protobuf and gRPC that it
allows, and used against a server. It needs the package index, as `deploy/local/test` does.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tandem.errors import NeverFits
from tests.architecture.test_sizes import ROOT
from tests.clients.python.fake_server import ANSWER, Act, fake_server

CLIENT = ROOT / "clients" / "python"
OLDEST = (
    "protobuf==5.26.1",
    "grpcio==1.64.0" if sys.version_info < (3, 13) else "grpcio==1.66.2",
)
"""
Lower ends of the ranges of clients/python/pyproject.toml, or the first with wheels for this Python:
gRPC compiles for a quarter of an hour without one.
"""
RUNTIMES = {"oldest": OLDEST, "protobuf 6": ("protobuf>=6,<7",), "newest": ()}

PROGRAM = """
import asyncio, json, sys
import google.protobuf, grpc, importlib.util
from tandem_client import AsyncClient, AsyncAdminClient, Client, NeverFits, QueueFull, TandemError

address = sys.argv[1]
with Client(address) as client:
    text = client.generate("hi", n=2, seed=1, logit_bias={3: 1.5}, stop=["x"]).result().text
    outcomes = list(client.generate_many(["a", "b"]))
    complete = client.complete("hi").text
    try:
        client.generate("hi", temperature=1.0).result()
    except NeverFits as error:
        refusal = [error.reason, error.field, error.metadata]

async def look():
    async with AsyncClient(address) as client, AsyncAdminClient(address) as admin:
        stats = await admin.stats()
        return [piece async for piece in client.generate("hi").text], stats.running_requests

print(json.dumps({
    "versions": [google.protobuf.__version__, grpc.__version__],
    "heavy": [name for name in ("numpy", "structlog", "typer") if importlib.util.find_spec(name)],
    "answers": [text, complete, *(one.text for one in outcomes)],
    "refusal": refusal,
    "looked": asyncio.run(look()),
}))
"""


def installed(folder: Path, *requirements: str) -> Path:
    """Make an environment with these packages, and return its Python; fail with what uv says."""
    subprocess.run(
        [sys.executable, "-m", "uv", "venv", "-q", "-p", sys.executable, folder], check=True
    )
    python = folder / "bin" / "python"
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "install",
        "-q",
        "--only-binary=grpcio",
        "--python",
        python,
        *requirements,
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        pytest.fail(
            f"these cannot be installed (no package index?): {requirements}\n{ended.stderr}"
        )
    return python


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from the source distribution as pip builds it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "uv", "build", "-q", "--out-dir", folder, CLIENT]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        pytest.fail(f"tandem-client cannot be built (no package index?)\n{ended.stderr}")
    (built,) = folder.glob("*.whl")
    return built


def declared(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


class TestDeclaration:
    def test_version_is_that_of_the_whole(self):
        """
        Both distributions are released together.
        """
        assert declared(ROOT)["version"] == declared(CLIENT)["version"]

    def test_oldest_versions_are_the_lower_ends_of_the_ranges(self):
        """
        The versions that are tested below are those that the distribution promises.
        """
        lower = {re.sub(",.*", "", one) for one in declared(CLIENT)["dependencies"]}
        assert {"protobuf>=5.26.1", "grpcio>=1.64"} <= lower


@pytest.mark.slow
class TestDistribution:
    @pytest.mark.parametrize("runtime", RUNTIMES)
    def test_client_works_with_the_protobuf_that_is_there(self, wheel, tmp_path, runtime):
        """
        Streams, batches, errors, asyncio and the admin client work, without numpy and structlog.
        """
        python = installed(tmp_path / "env", str(wheel), *RUNTIMES[runtime])
        refusal = Act(
            accept=False, error=NeverFits("too big", field="prompt", metadata={"limit": "3"})
        )
        with fake_server() as server:
            server.play(Act(), Act(), Act(), Act(), refusal, Act())
            command = [python, "-W", "error::UserWarning", "-c", PROGRAM, server.address]
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "" == ended.stderr
        said = json.loads(ended.stdout)
        if runtime == "oldest":
            assert [one.partition("==")[2] for one in OLDEST] == said["versions"]
        assert [] == said["heavy"]
        assert [ANSWER] * 4 == said["answers"]
        assert ["NEVER_FITS", "prompt", {"limit": "3"}] == said["refusal"]
        assert (ANSWER, 2) == ("".join(said["looked"][0]), said["looked"][1])

    def test_every_module_can_be_imported_with_the_command_line(self, wheel, tmp_path):
        """
        With the extra `cli` each module of the distribution is imported, and `tandem` runs.
        """
        python = installed(tmp_path / "env", f"{wheel}[cli]", *OLDEST)
        imports = (
            "import pkgutil, importlib, tandem_client, tandem\n"
            "for package in (tandem_client, tandem):\n"
            "    for one in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
            "        if not one.name.endswith('__main__'): importlib.import_module(one.name)\n"
        )
        subprocess.run([python, "-c", imports], check=True)
        tandem = python.with_name("tandem")
        with fake_server() as server:
            command = [tandem, "generate", "hi", "--address", server.address]
            ended = subprocess.run(command, capture_output=True, text=True, check=True)
        assert f"{ANSWER}\n" == ended.stdout
        version = subprocess.run([tandem, "--version"], capture_output=True, text=True, check=True)
        assert declared(CLIENT)["version"] == version.stdout.strip()
        served = subprocess.run([tandem, "up"], capture_output=True, text=True, check=False)
        assert "tandem-serve" in served.stderr
        assert 2 == served.returncode

    def test_command_without_its_extra_says_what_to_install(self, wheel, tmp_path):
        """
        `tandem` without the extra `cli` names it in one line.
        """
        python = installed(tmp_path / "env", str(wheel))
        command = [python.with_name("tandem"), "models"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "tandem-client[cli]" in ended.stderr
        assert (1, 2) == (ended.stderr.count("\n"), ended.returncode)
