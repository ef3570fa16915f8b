"""Triton's gather_rows and advance_rows against their definitions."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.decode_rows import (
    DecodeRowColumns,
    SlotColumns,
    TokenRing,
    advance_rows,
    gather_rows,
    reference,
    triton_kernel,
)
from kernels.sampling import SamplingColumns
from tests.kernels.conftest import poison

LINES = 3
MAX_LEN = 3000


@dataclass
class Scene:
    """S slots, random but for what must hold, and R rows of some of them, which hold poison."""

    slots: SlotColumns
    rows: DecodeRowColumns
    ring: TokenRing
    block_size: int

    @classmethod
    def of(cls, slot: list[int], block_size: int, device: torch.device, seed: int = 0) -> Scene:
        num_slots, num_blocks = 7, -(-MAX_LEN // block_size)
        draw = torch.Generator().manual_seed(seed)

        def integers(high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.randint(0, high, shape, generator=draw, dtype=dtype).to(device)

        def reals(*shape: int) -> Tensor:
            return torch.rand(shape, generator=draw).to(device)

        def unwritten(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, poison(dtype), dtype=dtype, device=device)

        position = integers(MAX_LEN - 1, num_slots)
        position[0], position[1] = 0, MAX_LEN - 1
        slots = SlotColumns(
            position=position,
            block_table=integers(10**6, num_slots, num_blocks),
            history=integers(2**31 - 1, num_slots, MAX_LEN + 1),
            temperature=reals(num_slots),
            top_k=integers(50, num_slots),
            top_p=reals(num_slots),
            seed=integers(2**62, num_slots, dtype=torch.int64) * -2,
            choice=integers(2**32, num_slots, dtype=torch.int64),
            min_p=reals(num_slots),
        )
        num_rows = len(slot)
        rows = DecodeRowColumns(
            slot=torch.tensor(slot, dtype=torch.int32, device=device),
            token_id=unwritten(num_rows),
            position=unwritten(num_rows, dtype=torch.int64),
            kv_position=unwritten(num_rows, dtype=torch.int64),
            seq_len=unwritten(num_rows),
            block_table=unwritten(num_rows, num_blocks),
            sampling=SamplingColumns(
                temperature=unwritten(num_rows, dtype=torch.float32),
                top_k=unwritten(num_rows),
                top_p=unwritten(num_rows, dtype=torch.float32),
                seed=unwritten(num_rows, dtype=torch.int64),
                position=unwritten(num_rows, dtype=torch.int64),
                choice=unwritten(num_rows, dtype=torch.int64),
                min_p=unwritten(num_rows, dtype=torch.float32),
            ),
        )
        ring = TokenRing(
            tokens=unwritten(LINES, num_rows + 2),
            line=torch.full((1,), LINES - 1, dtype=torch.int32, device=device),
        )
        return cls(slots, rows, ring, block_size)


def values(columns: Any) -> dict[str, Tensor]:
    """Return all tensors of a scene's part by name."""
    found: dict[str, Tensor] = {}
    for field in fields(columns):
        value = getattr(columns, field.name)
        found |= {field.name: value} if isinstance(value, Tensor) else values(value)
    return found


def assert_same(expected: Scene, found: Scene) -> None:
    """
    Assert that all that is read is equal: of tables, and of histories, what lies in a sequence.
    """
    for part in ("slots", "rows", "ring"):
        left, right = values(getattr(expected, part)), values(getattr(found, part))
        for name in left.keys() - {"block_table", "history"}:
            assert torch.equal(left[name], right[name]), name
    for row, length in enumerate(expected.rows.seq_len.tolist()):
        used = slice(-(-length // expected.block_size))
        tables = (scene.rows.block_table[row, used] for scene in (expected, found))
        assert torch.equal(*tables)
    assert torch.equal(expected.slots.history[:, :-1], found.slots.history[:, :-1])


SLOTS = {
    "one": [3],
    "shuffled": [5, 0, 1, 6, 2],
    "padded": [4, -1, 1, -1, -1],
    "padding-alone": [-1, -1],
}

each_batch = pytest.mark.parametrize("slot", list(SLOTS.values()), ids=list(SLOTS))


class TestDecodeRows:
    @pytest.mark.parametrize("block_size", [1, 7, 32])
    @each_batch
    def test_rows_are_gathered_as_defined(self, slot, block_size, device):
        """
        Rows get what their slots hold, padding what changes nothing, and the ring goes round.
        """
        expected, found = (Scene.of(slot, block_size, device) for _ in range(2))
        reference.gather_rows(expected.slots, expected.rows, expected.ring, block_size)
        triton_kernel.gather_rows(found.slots, found.rows, found.ring, block_size)
        assert [0] == found.ring.line.tolist()
        assert_same(expected, found)

    @each_batch
    def test_tokens_are_handed_on_as_defined(self, slot, device):
        """
        Tokens go to histories and the ring, positions go on, and padding leaves no trace; a row that is not valid is told as -1.
        """
        expected, found = (Scene.of(slot, 16, device) for _ in range(2))
        token = torch.arange(len(slot), device=device) + 100
        valid = token % 3 != 1
        for scene, module in ((expected, reference), (found, triton_kernel)):
            reference.gather_rows(scene.slots, scene.rows, scene.ring, 16)
            module.advance_rows(scene.slots, scene.rows, token, valid, scene.ring)
        assert_same(expected, found)
        told = [100 + row if real >= 0 and row % 3 else -1 for row, real in enumerate(slot)]
        assert told == found.ring.tokens[0, : len(slot)].tolist()

    def test_many_rows_are_handed_on(self, device):
        """
        Rows beyond those of one program get their turn too.
        """
        num_rows = triton_kernel.ROW_TILE + 3
        slot = [-1] * num_rows
        slot[0], slot[-1] = 2, 6
        expected, found = (Scene.of(slot, 16, device) for _ in range(2))
        token = torch.arange(num_rows, device=device)
        for scene, module in ((expected, reference), (found, triton_kernel)):
            reference.gather_rows(scene.slots, scene.rows, scene.ring, 16)
            module.advance_rows(scene.slots, scene.rows, token, token >= 0, scene.ring)
        assert_same(expected, found)


class TestArguments:
    def test_tables_of_unlike_widths_are_refused(self, device):
        """
        Rows with tables of fewer blocks than the slots' do not fit.
        """
        wide, narrow = Scene.of([1], 16, device), Scene.of([1], 32, device)
        with pytest.raises(ValueError, match="tables of 94 blocks, slots of 188"):
            gather_rows(wide.slots, narrow.rows, wide.ring, 16)

    def test_a_token_too_few_is_refused(self, device):
        """
        Every row needs a token.
        """
        scene = Scene.of([1, 2], 16, device)
        token = torch.zeros(1, dtype=torch.int64, device=device)
        with pytest.raises(ValueError, match="2 rows need as many int64 tokens"):
            advance_rows(scene.slots, scene.rows, token, token.bool(), scene.ring)
