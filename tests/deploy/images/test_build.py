"""`deploy/images/build.py`: which program it takes, what it hands over, and what it says if it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from deploy.images import build
from tests.deploy.kubernetes.manifests import KUBERNETES

RECORDER = """#!/bin/sh
printf '%s\\n' "$@" > {record}
for one in "$@"; do
  case $one in --secret=id=pip-config,src=*) cat "${{one#*src=}}" >> {record} ;; esac
done
exit {code}
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that is the PATH, with git and cat in it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("git", "cat"):
        found = build.shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("PIP_TIMEOUT", "77")
    monkeypatch.setenv("PIP_FIND_LINKS", "/somewhere")
    return folder


def install(folder: Path, name: str, code: int = 0) -> Path:
    """Put a program there that records its arguments and ends with a code."""
    record = folder / f"{name}.txt"
    program = folder / name
    program.write_text(RECORDER.format(record=record, code=code))
    program.chmod(0o755)
    return record


class TestBuild:
    def test_machine_without_a_program_is_told_loudly(self, programs: Path, capsys):
        """
        Without buildah, podman and docker nothing is built, and one line says so.
        """
        assert build.EXIT_UNAVAILABLE == build.main([])
        told = capsys.readouterr().err
        assert "NOTHING WAS BUILT" in told
        assert all(name in told for name in ("buildah", "podman", "docker"))

    def test_first_program_there_builds_all_images(self, programs: Path, capsys):
        """
        With podman and docker podman builds, and the names of all images are printed.
        """
        record, other = install(programs, "podman"), install(programs, "docker")
        assert 0 == build.main(["--tag=t"])
        names = [f"localhost/tandem-{image}:t" for image in build.IMAGES]
        assert names == capsys.readouterr().out.split()
        assert record.exists()
        assert not other.exists()

    def test_pip_configuration_reaches_the_build_without_paths_of_the_machine(self, programs: Path):
        """
        The build gets pip's settings as a secret; folders of this machine stay out of it.
        """
        record = install(programs, "buildah")
        assert 0 == build.main(["scheduler"])
        told = record.read_text().splitlines()
        assert "timeout = 77" in told
        assert not any(line.startswith("find-links") for line in told)

    def test_variant_and_index_reach_the_executor_alone(self, programs: Path):
        """
        For GPUs the executor has the extra of that name, and PyTorch comes from the index given.
        """
        record = install(programs, "buildah")
        chosen = ["--variant=gpu", "--torch-index=https://index.example/", "--base=localhost/b:1"]
        assert 0 == build.main(["executor", *chosen])
        told = record.read_text().splitlines()
        assert {
            "--build-arg=EXTRAS=executor,gpu",
            "--build-arg=TORCH_INDEX=https://index.example/",
            "--build-arg=BASE=localhost/b:1",
            f"--build-arg=VERSION={build.version()}",
        } <= set(told)
        assert 0 == build.main(["scheduler", *chosen])
        assert "EXTRAS" not in record.read_text()

    def test_variant_for_gpus_has_the_tag_that_manifests_name(self, programs: Path, capsys):
        """
        The executor for GPUs has the tag of the overlay gpu and of tensor-parallel, not that for CPUs.
        """
        install(programs, "buildah")
        assert 0 == build.main(["--variant=gpu"])
        names = capsys.readouterr().out.split()
        wanted = {
            f"{image.get('newName', image['name'])}:{image['newTag']}"
            for path in ("overlays/gpu", "components/tensor-parallel")
            for image in yaml.safe_load((KUBERNETES / path / "kustomization.yaml").read_text())[
                "images"
            ]
        }
        assert {names[build.IMAGES.index("executor")]} == wanted
        others = {f"localhost/tandem-{name}:{build.version()}" for name in ("scheduler", "gateway")}
        assert others == set(names) - wanted
        assert 0 == build.main(["executor"])
        assert f"localhost/tandem-executor:{build.version()}\n" == capsys.readouterr().out

    def test_failed_build_is_named(self, programs: Path, capsys):
        """
        A build that fails ends the command with 1 and the image's name.
        """
        install(programs, "buildah", code=3)
        assert 1 == build.main(["gateway", "--tag=t"])
        assert "buildah could not build localhost/tandem-gateway:t" in capsys.readouterr().err

    def test_unknown_image_is_refused(self, capsys):
        """
        An image that there is none of is refused with those there are.
        """
        with pytest.raises(SystemExit):
            build.main(["schedular"])
        assert "only scheduler, executor, gateway" in capsys.readouterr().err


class TestPipSettings:
    def test_environment_wins_over_files(self):
        """
        A setting of the environment takes the place of that of a file, and other sections are none.
        """
        listed = "global.timeout='60'\n:env:.timeout='180'\ninstall.no-deps='1'\nlist.format='json'"
        assert {"timeout": "180", "no-deps": "1"} == build.parse_settings(listed)

    def test_setting_of_several_lines_stays_one(self, tmp_path: Path):
        """
        A setting with several lines is written so that pip reads it as one.
        """
        secrets = build.write_secrets(tmp_path, {"trusted-host": "a.example\nb.example"})
        assert (
            "[global]\ntrusted-host = a.example\n  b.example\n" == secrets["pip-config"].read_text()
        )

    def test_certificates_that_are_not_there_are_named(self, tmp_path: Path):
        """
        A bundle of certificates that cannot be read is an error with its path.
        """
        with pytest.raises(build.BuildError, match=r"cert: .*/none\.pem: No such file"):
            build.write_secrets(tmp_path, {"cert": str(tmp_path / "none.pem")})
