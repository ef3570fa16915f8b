"""The command that records steps, on a CPU."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.gpu.parts import ROOT
from tests.gpu.rates.trace.steps import RECORDED_STEPS, WARM_STEPS, Kind, step_batches


class TestBatches:
    def test_each_step_decodes_all_rows_and_computes_the_next_chunk(self):
        """
        Rows that decode come first and grow by one position, the prompt by a chunk; blocks differ.
        """
        kind = Kind(num_rows=2, context=20, is_captured=False, chunk=5)
        batches = list(step_batches(kind, 4, 100))
        assert WARM_STEPS + RECORDED_STEPS == len(batches)
        assert [3, *[0] * (len(batches) - 1)] == [len(batch.admits) for batch in batches]
        for step, batch in enumerate(batches):
            assert [1, 1, 5] == batch.row_num_tokens.tolist()
            assert [19 + step, 19 + step, 5 * step] == batch.row_start.tolist()
            assert [1, 1, 0] == batch.row_flags.tolist()
        blocks = np.concatenate([each.block_ids for each in batches[0].admits])
        assert list(range(1, 13)) == sorted(blocks.tolist())


@pytest.mark.slow
def test_tiny_steps_are_recorded_on_a_cpu(tmp_path):
    """
    Decodes, and decodes beside a prompt's chunks, give figures and a compressed trace each.
    """
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.gpu.rates.trace"),
            *("--device", "cpu", "--tiny", "--traces", str(tmp_path)),
        ],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    rows = json.loads(done.stdout)
    assert ["decode-2-eager", "mixed-2+5-eager"] == [row["steps"] for row in rows]
    for row in rows:
        assert row["step_us"] >= row["gap_us"] > 0
        assert {"attention", "products"} <= set(row["shares"])
        assert "aten::linear" in {kernel["name"] for kernel in row["top"]}
        with gzip.open(tmp_path / f"tiny-{row['steps']}.json.gz") as file:
            assert json.load(file)["traceEvents"]
