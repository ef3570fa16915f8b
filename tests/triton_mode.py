"""Choice of how Triton's kernels run in tests: interpreted wherever there is no CUDA device."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()


def choose_triton_mode() -> None:
    """
    Choose for the whole process; a conftest calls it before a module of its folder is imported.

    Triton reads the choice when a function is decorated, its own functions' too, so what was
    imported before cannot be changed.

    Raises:
        pytest.UsageError: Triton was imported before in the other mode.
    """
    if not INTERPRETED:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    import triton  # noqa: PLC0415  # before anything else imports it in another mode

    if isinstance(triton.language.cdiv, triton.runtime.JITFunction):
        raise pytest.UsageError(
            "triton was imported before its mode was chosen: let the conftest of the folder whose "
            "modules import it call choose_triton_mode, or set TRITON_INTERPRET=1"
        )
