"""Offsets of more than 31 bits."""

from __future__ import annotations

import pytest

from tests.kernels.offsets.far_case import run_far_cases


@pytest.mark.slow
class TestFarTensors:
    def test_elements_behind_2_to_the_31_are_found(self):
        """
        Numbers more than 2**31 elements apart give what they give side by side.
        """
        interpreted = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        run_far_cases(
            "tests.kernels.triton.far_tensors",
            "products_of_far_rows",
            "products_to_far_rows",
            "products_by_far_parts",
            "decode_rows_of_far_slots",
            "patches_of_the_last_word",
            "edits_of_far_rows",
            "log_sums_of_far_rows",
            **interpreted,
        )
