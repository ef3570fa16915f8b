"""The directory that `--model` names: a path, or a model in the Hugging Face cache."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tandem.errors import InvalidModel

FORMAT = "a directory in Hugging Face format (config.json, *.safetensors, tokenizer.json)"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def find_model(model: Path, environ: Mapping[str, str]) -> Path:
    """
    Find the directory of a model; a name that is no path is looked up in the Hugging Face cache.

    Args:
        model: A directory, or a name such as Qwen/Qwen3-0.6B.
        environ: Environment; HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME or HOME tells the cache's path.

    Returns:
        The snapshot of the model's branch "main", else the newest snapshot with a config.json; the
        path as it was given if there is none.
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
    Check that the model directory exists.

    Raises:
        InvalidModel: It does not exist or is no directory; the message says how to get one.
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
    """Return the folder of huggingface_hub's downloads; None if no variable tells it."""
    if cache := environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    if cache := environ.get("XDG_CACHE_HOME"):
        return Path(cache).expanduser() / "huggingface" / "hub"
    if home := environ.get("HOME"):
        return Path(home) / ".cache" / "huggingface" / "hub"
    return None
