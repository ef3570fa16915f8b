"""Offsets of more than 31 bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
class TestFarTensors:
    @pytest.mark.parametrize(
        "case",
        [
            "products_of_far_rows",
            "products_to_far_rows",
            "products_by_far_chunks",
            "decode_rows_of_far_slots",
            "patches_of_the_last_word",
            "edits_of_far_rows",
            "log_sums_of_far_rows",
        ],
    )
    def test_elements_behind_2_to_the_31_are_found(self, case: str):
        """
        Numbers more than 2**31 elements apart give what they give side by side.
        """
        done = subprocess.run(  # a wrong address ends the process
            [
                sys.executable,
                "-c",
                f"from tests.kernels.triton.far_tensors import {case}; {case}()",
            ],
            cwd=ROOT,
            env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        assert 0 == done.returncode, done.stderr
