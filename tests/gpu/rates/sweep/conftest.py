"""Chooses how the Triton kernels run that the sweep's tests import."""

from __future__ import annotations

from tests.triton_mode import choose_triton_mode

choose_triton_mode()
