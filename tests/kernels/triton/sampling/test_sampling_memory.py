"""Memory that the Triton sampler takes beside the logits."""

from __future__ import annotations

import weakref

import pytest
import torch

from kernels.sampling.triton_kernel import Needs, draw
from kernels.sampling.tuning import search_bytes
from tests.kernels.triton.sampling.sampling_scenes import mixed_columns

VOCAB_SIZE = 3000


@pytest.mark.parametrize("num_rows", [1, 6])
def test_search_holds_what_is_planned_for_it(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, num_rows: int
):
    """
    At most the keys of one search live at once, of the rows that it takes together and with both cuts, and little beside them: what a graph's pool is planned with.
    """
    logits = torch.zeros((num_rows, VOCAB_SIZE), dtype=torch.bfloat16, device=device)
    columns = mixed_columns(num_rows, min_p=0.1).to(device)
    living: list[weakref.ref[torch.Tensor]] = []
    held: list[int] = []
    empty = torch.empty

    def noted(*shape: object, **options: object) -> torch.Tensor:
        made: torch.Tensor = empty(*shape, **options)
        living.append(weakref.ref(made))
        held.append(sum(one.nbytes for ref in living if (one := ref()) is not None))
        return made

    monkeypatch.setattr(torch, "empty", noted)
    draw(logits, columns, Needs())
    planned = search_bytes(num_rows, VOCAB_SIZE)
    assert num_rows * VOCAB_SIZE * 4 == planned
    assert planned <= max(held) < 1.1 * planned
