"""Path of the small model that comes with a checkout of the project."""

from __future__ import annotations

from pathlib import Path


def bundled_model() -> Path | None:
    """Return the folder of the model in a checkout of the project; None in other installations."""
    folder = Path(__file__).resolve().parents[3] / "deploy" / "models" / "tandem-py"
    return folder if folder.is_dir() else None
