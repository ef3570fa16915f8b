"""The figures of a trace, from traces that were made up."""

from __future__ import annotations

import pytest

from tests.gpu.rates.trace.events import Gap, Span, gaps_of, operation_of, shares, spans_of, summary


def event(name: str, begin: float, length: float, stream: int = 7, kind: str = "kernel") -> dict:
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "ts": begin,
        "dur": length,
        "tid": 1,
        "args": {"stream": stream},
    }


def spans(*events: dict) -> list[Span]:
    return spans_of({"traceEvents": list(events)}, on_device=True)


class TestSpans:
    def test_device_has_kernels_and_copies_in_order(self):
        """
        Kernels, copies and fills of a device are taken, by their begin; functions and marks are not.
        """
        others = [event("aten::mm", 0, 9, kind="cpu_op"), {"ph": "i", "name": "mark", "ts": 1}]
        found = spans(
            event("b", 5, 1), *others, event("Memcpy", 2, 1, kind="gpu_memcpy"), event("a", 0, 1)
        )
        assert ["a", "Memcpy", "b"] == [span.name for span in found]

    def test_cpu_has_functions_that_no_other_called(self):
        """
        A function within another's time, in the same thread, is part of that one.
        """
        calls = [("aten::linear", 0, 9), ("aten::mm", 1, 7), ("aten::add", 10, 2)]
        trace = {"traceEvents": [{**event(*call, kind="cpu_op"), "args": {}} for call in calls]}
        found = spans_of(trace, on_device=False)
        assert ["aten::linear", "aten::add"] == [span.name for span in found]


class TestGaps:
    def test_time_without_any_kernel_is_a_gap(self):
        """
        A gap has the kernels around it; the one before is that which ended last.
        """
        found = gaps_of(spans(event("a", 0, 10), event("b", 2, 3), event("c", 14, 1)))
        assert [Gap(4, "a", "c")] == found

    def test_kernels_that_overlap_or_touch_have_no_gap(self):
        """
        Programs of the next kernel that begin early leave none.
        """
        assert [] == gaps_of(spans(event("a", 0, 10), event("b", 8, 4, 9), event("c", 12, 1)))


class TestOperations:
    @pytest.mark.parametrize(
        ("name", "before", "operation"),
        [
            ("decode_kernel", "", "attention"),
            ("merge_kernel", "decode_kernel", "attention"),
            ("merge_kernel", "linear_kernel", "products"),
            ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "", "products"),
            ("void cublasLt::splitKreduce_kernel<32, 16>(float)", "", "products"),
            ("_rms_norm_kernel", "", "norms"),
            ("_rope_kv_write_kernel", "", "rope and KV writes"),
            ("_silu_mul_kernel", "", "silu"),
            ("_best_kernel", "", "sampling"),
            ("_search_kernel", "", "sampling"),
            ("_gather_rows_kernel", "", "begin and end"),
            ("_advance_rows_kernel", "", "begin and end"),
            ("Memcpy DtoH (Device -> Pinned)", "", "copies"),
            ("aten::scaled_dot_product_attention", "", "attention"),
            ("void at::native::index_elementwise_kernel<128>", "", "other"),
        ],
    )
    def test_kernel_belongs_to_the_operation_that_its_name_tells(self, name, before, operation):
        """
        Our kernels and those of libraries are sorted by name, merging ones by the kernel before.
        """
        assert operation == operation_of(name, before)

    def test_shares_add_up_to_one(self):
        """
        Each operation has its part of the kernels' time, largest first.
        """
        found = shares(spans(event("decode_kernel", 0, 1), event("gemm", 2, 3)))
        assert {"products": 0.75, "attention": 0.25} == found
        assert ["products", "attention"] == list(found)


class TestSummary:
    def test_figures_are_per_step(self):
        """
        Two steps of a product and attention: times, counts and gaps are those of one step.
        """
        steps = [
            step
            for at in (0.0, 20.0)
            for step in (event("gemm", at, 6), event("decode_kernel", at + 8, 4))
        ]
        found = summary(spans(*steps), 2)
        assert (16.0, 2.0, 10.0, 6.0) == tuple(
            found[name] for name in ("step_us", "kernels", "kernel_us", "gap_us")
        )
        assert {"7": 6.0} == found["gap_us_by_stream"]
        assert [
            ("decode_kernel", "gemm", 0.5, 4.0, 8.0),
            ("gemm", "decode_kernel", 1.0, 2.0, 2.0),
        ] == [
            (gap["before"], gap["after"], gap["count"], gap["us"], gap["largest_us"])
            for gap in found["gaps"]
        ]
        assert [
            {"name": "gemm", "count": 1.0, "us": 6.0},
            {"name": "decode_kernel", "count": 1.0, "us": 4.0},
        ] == found["top"]

    def test_streams_have_gaps_of_their_own(self):
        """
        A stream waits while another works; together they leave no gap.
        """
        found = summary(spans(event("a", 0, 4), event("b", 4, 4, 9), event("c", 8, 4)), 1)
        assert 0.0 == found["gap_us"]
        assert {"7": 4.0, "9": 0.0} == found["gap_us_by_stream"]

    def test_recording_without_kernels_has_none(self):
        """
        A device that did nothing is no error.
        """
        assert {"kernels": 0} == summary([], 4)
