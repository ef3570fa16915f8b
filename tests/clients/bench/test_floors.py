"""The rooflines of a decode step and of whole requests, against figures worked out by hand for an H200."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem_bench.device.floors import (
    Ceilings,
    kv_bytes_read,
    matmul_parameters,
    step_floor,
)
from tandem_bench.device.offline_floor import offline_floor
from tandem_bench.device.shapes import SHAPES
from tests.gpu.rates.workload import OfflineRequests

H200 = Ceilings(bytes_per_s=4.3e12, flop_per_s=788e12)
BF16_BYTES = 2
TINY = SHAPES["tiny"]

TABLE = {
    ("llama-1b", 1024): {
        1: (0.58, 1717),
        32: (0.82, 38813),
        128: (1.57, 81342),
        256: (2.80, 91410),
    },
    ("llama-8b", 1024): {1: (3.52, 284), 32: (4.49, 7128), 128: (7.49, 17099), 256: (12.87, 19896)},
    ("qwen3-0.6b", 1024): {
        1: (0.30, 3284),
        32: (1.15, 27798),
        128: (3.77, 33924),
        256: (7.38, 34693),
    },
    ("llama-1b", 4096): {
        1: (0.61, 1650),
        32: (1.57, 20336),
        128: (4.57, 28008),
        256: (8.79, 29112),
    },
    ("llama-8b", 4096): {1: (3.62, 277), 32: (7.49, 4275), 128: (19.47, 6574)},
    ("qwen3-0.6b", 4096): {
        1: (0.39, 2588),
        32: (3.77, 8481),
        128: (14.26, 8976),
        256: (28.35, 9029),
    },
}
"""Milliseconds and tokens per second by model, context and batch."""


class TestStepFloor:
    @pytest.mark.parametrize(("name", "context"), TABLE, ids=str)
    def test_is_that_of_the_published_table(self, name, context):
        """
        Weights read once or multiplied by, and the rows' cache, take the table's time at the table's rates.
        """
        for num_rows, (milliseconds, tokens_per_s) in TABLE[name, context].items():
            floor = step_floor(SHAPES[name], BF16_BYTES, H200, [context] * num_rows)
            # The table has two decimals of milliseconds, and whole tokens: of 277, 0.2 %.
            assert milliseconds == pytest.approx(1e3 * floor.total_s, abs=0.0051)
            assert tokens_per_s == pytest.approx(num_rows / floor.total_s, rel=2e-3)

    @pytest.mark.parametrize(
        ("name", "billions", "kv_bytes"),
        [
            ("llama-1b", 1.236, 32768),
            ("llama-8b", 7.505, 131072),
            ("qwen3-0.6b", 0.596, 114688),
            ("qwen3-4b", 4.022, 147456),
        ],
    )
    def test_sizes_are_those_of_the_models(self, name, billions, kv_bytes):
        """
        Matrices hold the published number of parameters, and a position the published bytes.
        """
        config = SHAPES[name]
        # Three decimals.
        assert billions == pytest.approx(matmul_parameters(config) / 1e9, abs=5e-4)
        assert kv_bytes == kv_bytes_read(config, BF16_BYTES, [1])

    def test_many_rows_are_bound_by_products(self):
        """
        Past as many rows as a device multiplies per byte it reads, the weights' part grows with the batch.
        """
        config = SHAPES["llama-8b"]
        few, some, many = (
            step_floor(config, BF16_BYTES, H200, [1] * rows).weights_s for rows in (1, 183, 366)
        )
        assert few == some
        # Products take longer than reads from 183.3 rows on, 0.2 % past 183.
        assert 2.0 == pytest.approx(many / some, rel=2e-3)

    def test_windows_bound_what_is_read(self):
        """
        A layer with a sliding window reads no more positions than it, rows of any lengths are added up.
        """
        config = replace(SHAPES["tiny"], windows=(None, 100))
        per_layer = kv_bytes_read(config, BF16_BYTES, [1]) // 2
        assert per_layer * (30 + 300 + 30 + 100) == kv_bytes_read(config, BF16_BYTES, [30, 300])


class TestOfflineFloor:
    @pytest.mark.parametrize(
        ("name", "kv_s", "weights_s", "prompts_s", "thousands_per_s"),
        [
            ("qwen3-0.6b", 3.23, 0.31, 0.16, 36),
            ("llama-1b", 0.92, 0.63, 0.35, 70),
            ("llama-8b", 3.69, 3.85, 2.53, 13),
        ],
    )
    def test_is_that_of_the_known_requests(self, name, kv_s, weights_s, prompts_s, thousands_per_s):
        """
        The 256 requests with 133,966 output tokens take the seconds, part by part, that follow by hand from an H200's rates.
        """
        requests = OfflineRequests.draw(256, 100, 1024, SHAPES[name].vocab_size)
        floor = offline_floor(
            SHAPES[name],
            BF16_BYTES,
            H200,
            [len(prompt) for prompt in requests.prompts],
            requests.output_len,
        )
        # The figures have two decimals; each request's last position more or less is 0.2 %.
        assert kv_s == pytest.approx(floor.kv_s, abs=0.0051, rel=3e-3)
        assert weights_s == pytest.approx(floor.weights_s, abs=0.0051, rel=3e-3)
        assert prompts_s == pytest.approx(floor.prompts_s, abs=0.0051)
        assert thousands_per_s == round(floor.tokens_per_s / 1e3)
        assert 133_966 == floor.num_tokens

    def test_each_step_has_the_rows_that_still_run(self):
        """
        A request decodes one step less than it has tokens, longer by one position in each, and then leaves.
        """
        floor = offline_floor(TINY, BF16_BYTES, H200, [5, 9, 7], [3, 1, 2])
        steps = [step_floor(TINY, BF16_BYTES, H200, lengths) for lengths in ([6, 8], [7])]
        assert floor.kv_s == pytest.approx(sum(step.kv_s for step in steps))
        assert floor.weights_s == pytest.approx(sum(step.weights_s for step in steps))

    def test_prompts_are_multiplied_by_all_layers_and_projected_once(self):
        """
        The layers' matrices count for each token of a prompt, and the output projection once for each request.
        """
        wide = replace(TINY, vocab_size=2 * TINY.vocab_size)
        slow = Ceilings(bytes_per_s=1e30, flop_per_s=1.0)
        one, other = (offline_floor(of, BF16_BYTES, slow, [10, 30], [1, 1]) for of in (TINY, wide))
        head = TINY.vocab_size * TINY.hidden_size
        layers = matmul_parameters(TINY) - head
        assert 2 * (40 * layers + 2 * head) == one.prompts_s
        assert 2 * 2 * head == other.prompts_s - one.prompts_s

    def test_short_prompts_take_as_long_as_reading_the_weights(self):
        """
        Where a prompt has too few tokens to keep a device busy, the weights are still read once.
        """
        floor = offline_floor(TINY, BF16_BYTES, H200, [1], [1])
        assert floor.total_s == pytest.approx(
            BF16_BYTES * matmul_parameters(TINY) / H200.bytes_per_s
        )

    def test_schedule_that_mixes_prompts_and_decodes_overlaps_products_and_reads(self):
        """
        Its least time is the longer of all products, of prompts and decodes, and of all reads, with weights read in each step of the longest answer.
        """
        floor = offline_floor(TINY, BF16_BYTES, H200, [5, 9], [3, 1])
        parameters = matmul_parameters(TINY)
        head = TINY.vocab_size * TINY.hidden_size
        products = (parameters - head) * 14 + head * 2 + parameters * 2
        assert floor.products_s == pytest.approx(2 * products / H200.flop_per_s)
        read_s = 3 * BF16_BYTES * parameters / H200.bytes_per_s
        assert floor.reads_s == pytest.approx(read_s + floor.kv_s)
        assert floor.reads_s == floor.overlapped_s
        slow = Ceilings(bytes_per_s=H200.bytes_per_s, flop_per_s=1.0)
        floor = offline_floor(TINY, BF16_BYTES, slow, [5, 9], [3, 1])
        assert floor.products_s == floor.overlapped_s

    @pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-1b", "llama-8b"])
    def test_overlapping_takes_less_time_than_prompts_apart(self, name):
        """
        For the 256 requests a schedule that mixes both could be faster than one that computes prompts apart.
        """
        requests = OfflineRequests.draw(256, 100, 1024, SHAPES[name].vocab_size)
        prompts = [len(prompt) for prompt in requests.prompts]
        floor = offline_floor(SHAPES[name], BF16_BYTES, H200, prompts, requests.output_len)
        assert floor.overlapped_s < floor.total_s

    def test_faster_device_has_a_higher_ceiling(self):
        """
        Twice the bandwidth and twice the matrix rate allow twice the tokens per second.
        """
        double = Ceilings(bytes_per_s=8.6e12, flop_per_s=1576e12)
        one, two = (
            offline_floor(TINY, BF16_BYTES, ceilings, [40, 7], [30, 9])
            for ceilings in (H200, double)
        )
        assert 2 * one.tokens_per_s == pytest.approx(two.tokens_per_s)
