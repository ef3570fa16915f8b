"""A model with the shape of another but with other weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def with_other_weights(model: Path, directory: Path) -> Path:
    """Copy a model directory with every weight changed a little; return the copy."""
    shutil.copytree(model, directory)
    file = directory / "model.safetensors"
    weights = load_file(file)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        changed = {
            name: weight + 0.02 * torch.randn(weight.shape).to(weight.dtype)
            for name, weight in weights.items()
        }
    save_file(changed, file, metadata={"format": "pt"})
    return directory
