"""The Containerfiles: lint, pinned bases, users, and what they say of the services."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deploy.images.build import EXTRAS, IMAGES, ROOT
from kernels.cpu_extension.build import cache_folder
from tests.deploy.flags import PREFIXES, help_of, unknown_variables
from tests.deploy.images.instructions import (
    CONTAINERFILES,
    instructions,
    last_stage,
    variables,
)

HADOLINT = Path(sys.executable).with_name("hadolint")
DIGEST = re.compile(r"BASE=[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}")
MODULES = {
    "scheduler": "scheduler_svc",
    "executor": "executor_svc",
    "gateway": "tandem_openai_gateway",
}


def lint(text: str) -> subprocess.CompletedProcess[str]:
    """Run hadolint without any configuration of the machine."""
    return subprocess.run(
        [HADOLINT, "--config", "/dev/null", "-"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )


def copied(image: str) -> list[str]:
    """Return the paths that are copied from the context."""
    every = instructions(CONTAINERFILES[image])
    texts = [one.text for one in every if one.name == "COPY" and "--from=" not in one.text]
    return [path for text in texts for path in text.split()[:-1]]


@pytest.mark.parametrize("image", IMAGES)
class TestContainerfile:
    def test_hadolint_finds_nothing(self, image: str):
        """
        A Containerfile passes all rules of hadolint but those that it names with a reason.
        """
        text = CONTAINERFILES[image].read_text()
        done = lint(text)
        assert (0, "") == (done.returncode, done.stdout)
        lines = text.splitlines()
        excuses = [number for number, line in enumerate(lines) if line.startswith("# hadolint")]
        assert [] == [number for number in excuses if not lines[number - 1].startswith("# ")]

    def test_every_stage_begins_with_the_pinned_base(self, image: str):
        """
        The base is one build argument whose default is pinned by digest, the same in all images.
        """
        every = instructions(CONTAINERFILES[image])
        base = next(one.text for one in every if one.name == "ARG" and one.stage == -1)
        first = instructions(CONTAINERFILES["scheduler"])[0].text
        assert DIGEST.fullmatch(base)
        assert first == base
        stages = [one.text.split()[0] for one in every if one.name == "FROM"]
        assert ["${BASE}"] * 2 == stages

    def test_runs_a_module_as_a_numeric_user(self, image: str):
        """
        The entrypoint is in exec form and runs a module that exists; the user is a number, not 0.
        """
        (entrypoint,) = last_stage(image, "ENTRYPOINT")
        assert ["/opt/tandem/bin/python", "-m", MODULES[image]] == json.loads(entrypoint)
        assert importlib.util.find_spec(MODULES[image]) is not None
        (user,) = last_stage(image, "USER")
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)

    def test_copies_what_exists_and_the_context_has(self, image: str):
        """
        Each path that is copied is in the repository and in the context.
        """
        allowed = [
            line[1:]
            for line in (ROOT / ".containerignore").read_text().splitlines()
            if line.startswith("!")
        ]
        assert [] == [path for path in copied(image) if not (ROOT / path).exists()]
        assert [] == [path for path in copied(image) if path not in allowed]

    def test_has_the_labels_of_oci(self, image: str):
        """
        The labels tell title, description, licence, version and commit.
        """
        (labels,) = last_stage(image, "LABEL")
        wanted = {"title", "description", "licenses", "version", "revision"}
        assert wanted == set(re.findall(r"org\.opencontainers\.image\.(\w+)=", labels))

    def test_ports_are_those_of_the_service(self, image: str):
        """
        The ports that are exposed are the defaults of the service's addresses.
        """
        (ports,) = last_stage(image, "EXPOSE")
        told = " ".join(help_of(MODULES[image]).split())
        assert [] == [port for port in ports.split() if f"default: 127.0.0.1:{port}" not in told]


class TestServices:
    @pytest.mark.parametrize("image", ["scheduler", "executor"])
    def test_variables_are_options(self, image: str):
        """
        Each variable with the prefix of the service is one of its options.
        """
        names = [name for name in variables(image) if name != "TANDEM_CACHE_DIR"]
        assert any(name.startswith(PREFIXES[MODULES[image]]) for name in names)
        assert [] == unknown_variables(MODULES[image], names)

    def test_planted_variable_is_unknown(self):
        """
        A variable that stands for no option of the executor is named.
        """
        wrong = ["TANDEM_EXECUTOR_LISTEN", "TANDEM_EXECUTOR_LISTENS"]
        assert wrong[1:] == unknown_variables("executor_svc", wrong)

    def test_compiled_kernels_go_to_a_folder_of_the_user(self):
        """
        The executor's cache is the folder that the image makes for its user.
        """
        (user,) = last_stage("executor", "USER")
        owner = user.partition(":")[0]
        made = [text for text in last_stage("executor", "RUN") if "install -d" in text]
        folder = str(cache_folder(variables("executor")).parent)
        assert [True] == [f"-o {owner} " in text and text.endswith(folder) for text in made]

    def test_scheduler_has_neither_executor_nor_kernels(self):
        """
        The scheduler's image holds the code of its own service and the shared package alone.
        """
        assert {"scheduler_svc", "protos/python/tandem"} == {
            path for path in copied("scheduler") if (ROOT / path).is_dir()
        }

    def test_scheduler_can_send_traces(self):
        """
        The scheduler's image has the packages of the option --otlp-endpoint, which it ends without.
        """
        every = instructions(CONTAINERFILES["scheduler"])
        (extras,) = re.findall(r"'\.\[([\w,]+)\]'", " ".join(one.text for one in every))
        assert {"scheduler", "tracing"} == set(extras.split(","))

    def test_context_is_the_same_for_docker(self):
        """
        Docker, which reads a file of another name, sends the context that other builders send.
        """
        assert (ROOT / ".containerignore").read_text() == (ROOT / ".dockerignore").read_text()

    def test_extras_are_those_of_the_project(self):
        """
        Both variants of the executor install extras that pyproject.toml has.
        """
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        wanted = {extra for extras in EXTRAS.values() for extra in extras.split(",")}
        assert wanted <= set(project["optional-dependencies"])


def test_hadolint_sees_a_planted_fault():
    """
    A base without a tag and a shell-form entrypoint are both named.
    """
    done = lint("FROM debian\nENTRYPOINT python3 -m scheduler_svc\n")
    assert done.returncode
    assert {"DL3006", "DL3025"} <= set(re.findall(r"DL\d+", done.stdout))
