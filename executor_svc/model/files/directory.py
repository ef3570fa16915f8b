"""Which directory `--model` means: a path, or a model in the Hugging Face cache."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tandem.errors import InvalidModel

FORMAT = "a directory in Hugging Face format (config.json, *.safetensors, tokenizer.json)"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def find_model(model: Path, environ: Mapping[str, str]) -> Path:
    """
    The directory of a model; what is no directory is looked for by name in the Hugging Face cache.

    Args:
        model: A directory, or a name such as Qwen/Qwen3-0.6B.
        environ: Says where the cache is: HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME or HOME.

    Returns:
        The snapshot that the name's branch "main" stands for, else the newest one with a
        config.json; the path as it was given where there is none.
    """
    cache = _hub_cache(environ)
    if model.exists() or cache is None or not _HUB_NAME.fullmatch(str(model)):
        return model
    folder = cache / f"models--{str(model).replace('/', '--')}"
    try:
        named = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except (OSError, UnicodeDecodeError):
        named = folder
    found = (path.parent for path in folder.glob("snapshots/*/config.json"))
    snapshots = sorted(found, key=lambda path: path.stat().st_mtime)
    if named in snapshots:
        return named
    return snapshots[-1] if snapshots else model


def check_model_directory(model: Path) -> None:
    """
    Make sure that there is one.

    Raises:
        InvalidModel: There is not; the sentence says how to get one.
    """
    if model.is_dir():
        return
    if model.exists():
        raise InvalidModel(f"model directory {model} is not a directory: give {FORMAT}")
    is_name = _HUB_NAME.fullmatch(str(model))
    name, folder = (str(model), model.name) if is_name else ("ORG/NAME", "DIR")
    also = " and is not in the Hugging Face cache" if is_name else ""
    raise InvalidModel(
        f"model directory {model} does not exist{also}: give {FORMAT}. Nothing is downloaded here; "
        f"the package huggingface_hub gets one: hf download {name} --local-dir {folder}"
    )


def _hub_cache(environ: Mapping[str, str]) -> Path | None:
    """Where huggingface_hub keeps what it downloads; None where no variable says."""
    if cache := environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    if cache := environ.get("XDG_CACHE_HOME"):
        return Path(cache).expanduser() / "huggingface" / "hub"
    if home := environ.get("HOME"):
        return Path(home) / ".cache" / "huggingface" / "hub"
    return None
