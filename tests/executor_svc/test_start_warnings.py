"""Warnings of an executor's start, as it tells them to callers that ask."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
import torch

from executor_svc.config.limits import fit_limits
from executor_svc.config.settings import load_settings
from executor_svc.device.choice import choose_kernels
from executor_svc.engine import load_engine
from executor_svc.model.config import read_model_config
from executor_svc.start_warnings import kept_warnings, warn
from kernels.cpu_extension import ExtensionUnavailable

CPU = torch.device("cpu")


@pytest.fixture
def model_dir(zoo: Callable[[str], Path]) -> Path:
    """A tiny model that supports 512 tokens."""
    return zoo("llama_mha")


class TestDescription:
    def test_all_warnings_of_the_start_are_in_it(self, model_dir: Path, tmp_path: Path):
        """
        A missing tokenizer, a setting without effect, unusual blocks and a length that memory
        lowered are told, each in a sentence.
        """
        folder = shutil.copytree(model_dir, tmp_path / "model")
        (folder / "tokenizer.json").unlink()
        flags = ["--device=cpu", "--num-threads=1", "--num-cuda-graphs=4"]
        limits = ["--block-size=24", "--max-num-blocks=4"]
        loaded = load_settings([f"--model={folder}", *flags, *limits], {})
        assert [
            "the model has no tokenizer.json: prompts must be token ids, and output has no text",
            "block_size 24 is unusual: powers of two from 1 to 128 are advised",
            (
                "max_model_len is 96, the tokens that the KV memory holds, instead of 512: raise "
                "max_num_blocks (4, --max-num-blocks) for longer requests"
            ),
            (
                "num_cuda_graphs=4 (--num-cuda-graphs) has no effect: the device is cpu, where steps "
                "run eagerly"
            ),
        ] == list(load_engine(loaded, "boot").description.warnings)

    def test_limit_of_the_scheduler_alone_is_none_of_them(self, model_dir: Path):
        """
        An executor has no max_num_seqs of its own to compare max_batch_size with.
        """
        loaded = load_settings([f"--model={model_dir}", "--max-batch-size=300"], {})
        with kept_warnings() as kept:
            fit_limits(loaded, read_model_config(model_dir), CPU)
        assert [] == kept


class TestKept:
    def test_missing_library_is_kept(self, monkeypatch: pytest.MonkeyPatch):
        """
        The reason is told when the C++ kernels cannot be had.
        """

        def missing() -> None:
            raise ExtensionUnavailable("there is no C++ compiler")

        monkeypatch.setattr("kernels.paged_attention.load_library", missing)
        with kept_warnings() as kept:
            choose_kernels(CPU, "auto")
        monkeypatch.undo()
        choose_kernels(CPU, "auto")
        assert [
            "PyTorch computes, and not the C++ kernels, which are faster: there is no C++ compiler"
        ] == kept

    def test_warning_after_the_start_is_only_logged(self):
        """
        Outside of a start a warning goes to the log, with its sentence, and is kept nowhere.
        """
        with kept_warnings() as kept:
            pass
        with structlog.testing.capture_logs() as logs:
            warn("late", "it is late", by=3)
        assert ([], [{"event": "late", "what": "it is late", "by": 3, "log_level": "warning"}]) == (
            kept,
            logs,
        )
