"""The compose file, read as data: flags, hardening, ports, health and what it refers to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.images.build import IMAGES, version
from tests.deploy.flags import unknown_flags
from tests.deploy.images.instructions import (
    CONTAINERFILES,
    instructions,
    last_stage,
    variables,
)
from tests.deploy.images.test_containerfiles import MODULES

FILE = Path(__file__).resolve().parents[3] / "deploy/compose/compose.yaml"
VARIABLE = re.compile(r"\$\{\w+:-([^}]*)\}")
GRACE = re.compile(r"--(?:drain|stop)-grace-s=(\d+)")
MARGIN_S = 10


def composed() -> dict[str, Any]:
    """Return the file with the defaults of its variables."""
    return yaml.safe_load(VARIABLE.sub(r"\1", FILE.read_text()))


def words_of(service: dict[str, Any]) -> str:
    return " ".join(service["command"])


@pytest.fixture
def services() -> dict[str, dict[str, Any]]:
    """Return the services by their names."""
    return composed()["services"]


@pytest.mark.parametrize("name", IMAGES)
class TestService:
    def test_flags_are_those_of_the_module(self, services, name: str):
        """
        Each flag of a command is known to the module that the image runs.
        """
        assert [] == unknown_flags(MODULES[name], services[name]["command"])

    def test_image_is_the_one_that_is_built(self, services, name: str):
        """
        The image's name is the one that build.py gives it by default.
        """
        assert f"localhost/tandem-{name}:{version()}" == services[name]["image"]

    def test_container_has_few_rights(self, services, name: str):
        """
        A container has a read-only root, no capability, no way to more rights, and a numeric user.
        """
        service = services[name]
        assert service["read_only"] is True
        assert ["ALL"] == service["cap_drop"]
        assert ["no-new-privileges:true"] == service["security_opt"]
        assert last_stage(name, "USER") == [service["user"]]
        assert ["/tmp"] == service["tmpfs"]

    def test_ports_are_published_on_loopback_alone(self, services, name: str):
        """
        No port is published to other machines; what is published is a port of the image.
        """
        (exposed,) = last_stage(name, "EXPOSE")
        for port in services[name].get("ports", []):
            place, outside, inside = port.split(":")
            assert ("127.0.0.1", outside) == (place, inside)
            assert inside in exposed.split()

    def test_health_check_runs_what_the_image_has(self, services, name: str):
        """
        The health check runs Python, without a shell, on a module of the image.
        """
        first, program, flag, what, *_ = services[name]["healthcheck"]["test"]
        assert ("CMD", "python") == (first, program)
        assert flag in {"-m", "-c"}
        if flag == "-m":
            assert "tandem_health" == what
            assert any("health.py /code/tandem_health.py" in text for text in copies(name))
        else:
            compile(what, "healthcheck", "exec")

    def test_service_may_drain_before_it_is_killed(self, services, name: str):
        """
        The time from SIGTERM to SIGKILL is the service's own grace time and some seconds more.
        """
        (grace_s,) = GRACE.findall(words_of(services[name]))
        stop_s = int(services[name]["stop_grace_period"].removesuffix("s"))
        assert int(grace_s) + MARGIN_S <= stop_s

    def test_refers_to_what_the_file_has(self, services, name: str):
        """
        Networks, volumes and secrets of a service are declared, and secrets are read where they lie.
        """
        whole, service = composed(), services[name]
        assert set(service["networks"]) <= set(whole["networks"])
        named = [one.split(":")[0] for one in service.get("volumes", []) if one[0] not in "./"]
        assert set(named) <= set(whole["volumes"])
        for secret in service.get("secrets", []):
            assert secret["source"] in whole["secrets"]
            assert f"--link-token-file={secret['target']}" in service["command"]


def copies(name: str) -> list[str]:
    """Return the texts of an image's COPY instructions."""
    return [one.text for one in instructions(CONTAINERFILES[name]) if one.name == "COPY"]


class TestFile:
    def test_services_are_the_images(self, services):
        """
        There is one service for each image, and the gateway alone needs a profile.
        """
        assert set(IMAGES) == set(services)
        assert {"gateway"} == {name for name, one in services.items() if "profiles" in one}

    def test_step_link_is_seen_by_its_two_ends_alone(self, services):
        """
        The executor is in no network but that of the link, which leads nowhere else.
        """
        assert ["link"] == services["executor"]["networks"]
        assert {"executor", "scheduler"} == {
            name for name, one in services.items() if "link" in one["networks"]
        }
        assert composed()["networks"]["link"] == {"internal": True}

    def test_services_find_each_other(self, services):
        """
        Addresses between services are the names and ports that the others listen at.
        """
        assert "--executor=executor:50061" in services["scheduler"]["command"]
        assert "--listen=0.0.0.0:50061" in services["executor"]["command"]
        assert "--scheduler=scheduler:50051" in services["gateway"]["command"]
        assert "--listen=0.0.0.0:50051" in services["scheduler"]["command"]

    def test_kernels_are_kept_in_the_volume(self, services):
        """
        The volume of compiled kernels is mounted where the executor's image puts them.
        """
        folder = variables("executor")["TANDEM_CACHE_DIR"]
        assert f"kernels:{folder}" in services["executor"]["volumes"]

    def test_default_model_is_there(self, services):
        """
        By default the bundled model is served, under its name.
        """
        source = services["executor"]["volumes"][0].split(":")[0]
        assert (FILE.parent / source / "config.json").is_file()
        assert "--model-name=tandem-py" in services["executor"]["command"]
