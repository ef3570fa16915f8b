"""Directories that values of `--model` stand for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from executor_svc.config.settings import load_settings
from executor_svc.model.files.directory import check_model_directory, find_model
from tandem.errors import InvalidModel

NAME = "meta-llama/Llama-3.2-1B"


def snapshot(cache: Path, revision: str, age_s: int = 0) -> Path:
    """A downloaded revision of the model as huggingface_hub lays it out."""
    folder = cache / "models--meta-llama--Llama-3.2-1B" / "snapshots" / revision
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    os.utime(folder, (1_000_000 - age_s, 1_000_000 - age_s))
    return folder


class TestFindModel:
    @pytest.mark.parametrize(
        ("variable", "below"),
        [
            ("HF_HUB_CACHE", ""),
            ("HF_HOME", "hub"),
            ("XDG_CACHE_HOME", "huggingface/hub"),
            ("HOME", ".cache/huggingface/hub"),
        ],
    )
    def test_downloaded_model_is_found_by_name(self, tmp_path, variable, below):
        """
        A model's name stands for its snapshot, wherever the variables put the Hugging Face cache.
        """
        expected = snapshot(tmp_path / below, "abc")
        assert expected == find_model(Path(NAME), {variable: str(tmp_path)})

    def test_main_branch_goes_before_newer_revisions(self, tmp_path):
        """
        The snapshot that "main" names is taken if there are several, else the newest.
        """
        main, newest = snapshot(tmp_path, "aaa", age_s=9), snapshot(tmp_path, "bbb")
        assert newest == find_model(Path(NAME), {"HF_HUB_CACHE": str(tmp_path)})
        refs = main.parent.parent / "refs"
        refs.mkdir()
        (refs / "main").write_text("aaa\n")
        assert main == find_model(Path(NAME), {"HF_HUB_CACHE": str(tmp_path)})

    def test_directory_goes_before_the_cache(self, tmp_path, monkeypatch):
        """
        A directory of that name in the current one is taken as it is.
        """
        snapshot(tmp_path / "cache", "abc")
        (tmp_path / NAME).mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        assert Path(NAME) == find_model(Path(NAME), {"HF_HUB_CACHE": str(tmp_path / "cache")})

    def test_clients_see_the_name_and_not_the_revision(self, tmp_path):
        """
        A model from the cache is served under the name that was asked for.
        """
        folder = snapshot(tmp_path, "abc")
        loaded = load_settings([f"--model={NAME}"], {"HF_HUB_CACHE": str(tmp_path)})
        assert (folder, NAME) == (loaded.settings.model, loaded.model_name)


class TestMissingModel:
    def test_name_says_how_to_download_it(self):
        """
        A name that is not in the cache is refused with a command to paste that downloads it; Tandem
        downloads nothing.
        """
        with pytest.raises(InvalidModel) as refused:
            check_model_directory(Path(NAME))

        assert (
            f"{NAME} does not exist and is not in the Hugging Face cache" in refused.value.message
        )
        assert refused.value.message.endswith(f"hf download {NAME} --local-dir Llama-3.2-1B")
