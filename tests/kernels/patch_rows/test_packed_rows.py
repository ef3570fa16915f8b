"""Columns packed into one tensor, and the patches that change them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.patch_rows import PackedRows, RowField, patch_rows

CPU = torch.device("cpu")
FIELDS = (
    RowField(name="token", dtype=torch.int32),
    RowField(name="seed", dtype=torch.int64),
    RowField(name="temperature", dtype=torch.float32),
    RowField(name="block_table", dtype=torch.int32, width=7),
    RowField(name="limits", dtype=torch.int64, width=3),
)


def packed() -> PackedRows:
    return PackedRows(FIELDS, 5, CPU)


class TestColumns:
    def test_columns_are_typed_views_at_fixed_places(self):
        """
        Each column is contiguous, of its own type, 16-byte aligned, zero at first, and never moves.
        """
        rows = packed()
        shapes = {"block_table": (5, 7), "limits": (5, 3)}
        for field in FIELDS:
            column = rows.column(field.name)
            assert field.dtype == column.dtype
            assert shapes.get(field.name, (5,)) == tuple(column.shape)
            assert column.is_contiguous()
            assert 0 == (column.data_ptr() - rows.words.data_ptr()) % 16
            assert not column.any()
            assert column.data_ptr() == rows.column(field.name).data_ptr()

    def test_columns_do_not_overlap(self):
        """
        A value written to one column is seen in no other.
        """
        rows = packed()
        for number, field in enumerate(FIELDS, start=1):
            rows.column(field.name).fill_(number)
        for number, field in enumerate(FIELDS, start=1):
            assert (rows.column(field.name) == number).all()

    @pytest.mark.parametrize(
        ("fields", "num_rows", "sentence"),
        [
            ((FIELDS[0], FIELDS[0]), 5, "two columns are named 'token'"),
            ((RowField(name="x", dtype=torch.bool),), 5, "torch.bool does not pack"),
            ((RowField(name="x", dtype=torch.int32, width=0),), 5, "is empty"),
            (FIELDS, 0, "is empty"),
            ((RowField(name="x", dtype=torch.int32, width=2**20),), 2**11, "too many"),
        ],
        ids=["twice", "type", "width", "rows", "size"],
    )
    def test_what_cannot_be_packed_is_refused(self, fields, num_rows, sentence):
        """
        Columns that do not fit words, or that a patch could not address, are an error.
        """
        with pytest.raises(ValueError, match=sentence):
            PackedRows(fields, num_rows, CPU)


class TestPatch:
    def test_rows_of_every_type_arrive_whole(self):
        """
        All changes of a patch, of any type and width, take effect together and nothing else changes.
        """
        rows, patch = packed(), packed().patch()
        row = np.array([3, 0])
        patch.set_rows("token", row, np.array([70_000, -5]))
        patch.set_rows("seed", row, np.array([-(2**63), 2**40 + 1]))
        patch.set_rows("temperature", row, np.array([0.1, np.inf]))
        patch.set_rows("block_table", row, np.array([[1, 2], [3, 4]]))
        patch.set_rows("limits", np.array([4]), np.array([[-1, 2**33, 5]]))
        assert not rows.words.any()
        patch_rows(rows.words, patch.packed())
        assert [-5, 0, 0, 70_000, 0] == rows.column("token").tolist()
        assert [2**40 + 1, 0, 0, -(2**63), 0] == rows.column("seed").tolist()
        expected = torch.tensor([torch.inf, 0, 0, 0.1, 0])
        assert torch.equal(expected, rows.column("temperature"))
        assert [3, 4, 0, 0, 0, 0, 0] == rows.column("block_table")[0].tolist()
        assert [1, 2, 0, 0, 0, 0, 0] == rows.column("block_table")[3].tolist()
        assert not rows.column("block_table")[[1, 2, 4]].any()
        assert [-1, 2**33, 5] == rows.column("limits")[4].tolist()
        assert not rows.column("limits")[:4].any()

    def test_single_entries_of_wide_rows(self):
        """
        Entries can be changed one by one, several of a row in one patch.
        """
        rows, patch = packed(), packed().patch()
        patch.set_entries(
            "block_table", np.array([1, 1, 4]), np.array([6, 0, 2]), np.array([9, 8, 7])
        )
        patch.set_entries("limits", np.array([2]), np.array([1]), np.array([-(2**35)]))
        patch_rows(rows.words, patch.packed())
        assert [8, 0, 0, 0, 0, 0, 9] == rows.column("block_table")[1].tolist()
        assert 7 == rows.column("block_table")[4, 2]
        assert 8 + 9 + 7 == rows.column("block_table").sum()
        assert [0, -(2**35), 0] == rows.column("limits")[2].tolist()

    def test_many_random_patches_equal_direct_writes(self):
        """
        Columns hold after any patches what writing into them one after another would leave.
        """
        random, rows = np.random.default_rng(7), packed()
        mirror = {field.name: rows.column(field.name).clone() for field in FIELDS}
        for _ in range(50):
            patch = rows.patch()
            for field in FIELDS:
                row = random.permutation(5)[: random.integers(0, 6)]
                width = () if field.width is None else (int(random.integers(1, field.width + 1)),)
                value = random.integers(-(2**31), 2**31, (len(row), *width))
                patch.set_rows(field.name, row, value)
                where = (row, slice(None, *width)) if width else row
                mirror[field.name].numpy()[where] = value
            patch_rows(rows.words, patch.packed())
            for name, expected in mirror.items():
                assert torch.equal(expected, rows.column(name)), name

    def test_patch_of_nothing_changes_nothing(self):
        """
        An empty patch, or changes of no rows, can be applied.
        """
        rows, patch = packed(), packed().patch()
        patch.set_rows("token", np.array([], np.int64), np.array([]))
        patch.set_rows("block_table", np.array([], np.int64), np.zeros((0, 7)))
        assert (2, 0) == patch.packed().shape
        patch_rows(rows.words, patch.packed())
        assert not rows.words.any()

    @pytest.mark.parametrize(("row", "index"), [(5, 0), (-1, 0), (0, 7), (0, -1)])
    def test_change_outside_a_column_is_refused(self, row: int, index: int):
        """
        A row or entry that does not exist is an error, since a device would write elsewhere.
        """
        with pytest.raises(ValueError, match=r"'block_table' has 5 rows of 7 entries"):
            packed().patch().set_entries(
                "block_table", np.array([row]), np.array([index]), np.array([1])
            )

    def test_row_wider_than_its_column_is_refused(self):
        """
        More entries than a row has would run into the next row, and are an error.
        """
        with pytest.raises(ValueError, match="8 entries for column 'block_table' of 7 per row"):
            packed().patch().set_rows("block_table", np.array([0]), np.zeros((1, 8)))

    def test_entry_changed_twice_is_refused(self):
        """
        Two changes of one entry have no order on a device, and are an error.
        """
        patch = packed().patch()
        patch.set_rows("seed", np.array([1, 2]), np.array([1, 2]))
        patch.set_rows("seed", np.array([2]), np.array([3]))
        with pytest.raises(ValueError, match="changes an entry twice"):
            patch.packed()


class TestPatchRows:
    def test_holes_are_skipped(self):
        """
        A negative place writes nothing, so that a patch may hold fewer words than it has room for.
        """
        words = torch.arange(4, dtype=torch.int32)
        patch_rows(words, torch.tensor([[2, -1, 0], [20, 30, 40]], dtype=torch.int32))
        assert [40, 1, 20, 3] == words.tolist()

    @pytest.mark.parametrize(
        ("words", "patch", "sentence"),
        [
            (torch.zeros(4), torch.zeros((2, 1)).int(), "words must be int32"),
            (torch.zeros(8).int()[::2], torch.zeros((2, 1)).int(), "words must be int32, contig"),
            (torch.zeros(4).int(), torch.zeros((3, 1)).int(), r"patch must be .* \[2, N\]"),
            (torch.zeros(4).int(), torch.zeros((2, 1)), "patch must be int32"),
            (torch.zeros(4).int(), torch.zeros((2, 1)).int().to("meta"), "on cpu, got .* on meta"),
        ],
        ids=["words-type", "words-stride", "patch-shape", "patch-type", "device"],
    )
    def test_wrong_tensors_are_refused(self, words, patch, sentence):
        """
        Shapes, types and devices are checked before anything is written.
        """
        with pytest.raises(ValueError, match=sentence):
            patch_rows(words, patch)
