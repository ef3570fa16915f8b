"""Kernels that the first requests would else compile."""

from __future__ import annotations

import pytest

from executor_svc.step.warm_up import warm_up_batches
from kernels.sampling.tuning import Cut


@pytest.mark.parametrize("vocab_size", [256, 49152, 151936])
@pytest.mark.parametrize("max_rows", [1, 16, 40, 64, 65, 300])
def test_every_cut_of_drawing_is_among_the_steps_of_a_warm_up(max_rows: int, vocab_size: int):
    """
    A step of the warm-up has drawn tokens cut like those of a step of any number of rows.
    """
    batches = warm_up_batches(100, 16, max_rows, compiles=True)
    warm = {Cut.of(len(step.row_slot), vocab_size) for step in batches if len(step.row_slot)}
    assert {Cut.of(num_rows, vocab_size) for num_rows in range(1, max_rows + 1)} == warm
