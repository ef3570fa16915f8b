"""Offsets of more than 31 bits in C++."""

from __future__ import annotations

import pytest

from tests.kernels.offsets.far_case import run_far_cases


@pytest.mark.slow
@pytest.mark.compiler
class TestOffsets:
    def test_elements_behind_2_to_the_31_are_found(self):
        """
        Numbers more than 2**31 elements apart give what they give side by side.
        """
        run_far_cases(
            "tests.kernels.offsets.far_in_cpp",
            "norms_and_gates",
            "products",
            "rotary_positions_and_writes",
            "attention_to_the_last_blocks",
            "draws_and_log_probabilities",
        )
