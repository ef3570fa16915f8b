"""Outcomes of a run, judged and written down; no device is needed for that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem_bench.kernels import command as kernels
from tandem_bench.model import decode_steps
from tests.gpu.aims import (
    CAPTURED_STEPS,
    DECODES,
    LOADS,
    LONG_PROMPT,
    LONG_PROMPTS,
    WIDE_DECODES,
    WIDE_ROWS,
    aims,
    beside_eager,
    beside_flashinfer,
    facts,
)
from tests.gpu.parts import Outcome
from tests.gpu.plan import groups_on_gpu
from tests.gpu.rates import serve
from tests.gpu.results import Results, UnfitResults, earlier_outcomes, merged, write_results


def decode(shape, implementation, time_us, percent):
    of = {"operation": "decode", "shape": shape, "implementation": implementation}
    return {**of, "time_us": time_us, "percent_of_ceiling": percent, "tflop_per_s": 0.0}


def step(model, rows, percent, **more):
    place = {"model": model, "rows": rows, "context": 1024}
    return {**place, "graph": rows, "step_ms": 2.0, "percent_of_floor": percent, **more}


ROWS = {
    "decode attention": [
        decode("B=1 ctx=1024", "tandem", 10.0, 10.0),
        decode("B=1 ctx=1024", "flashinfer", 12.0, 9.0),
        decode("B=1 ctx=1024", "flashinfer-tensor-cores", 9.0, 12.0),
        decode("B=32 ctx=1024", "tandem", 10.0, 84.0),
        decode("B=64 ctx=1024", "tandem", 10.0, 88.0),
        decode("B=64 ctx=1024", "flashinfer", 13.0, 80.0),
    ],
    "prefill attention": [
        {
            **decode(shape, "tandem", 1.0, 1.0),
            "operation": "prefill",
            "tflop_per_s": rate,
        }
        for shape, rate in (
            ("N=1 len=512 heads=32/8x128", 100.0),
            ("N=1 len=4096 heads=32/8x128", 410.0),
            ("N=4 len=4096 heads=32/8x128", 399.0),
        )
    ],
    "decode steps of llama-8b": [
        step("llama-8b", 32, 80.0, eager_step_ms=3.0, times_eager=1.5),
        step("llama-8b", 64, 90.0),
        step("llama-8b", 128, 90.0, eager_step_ms=1.0, times_eager=0.5, graph=0),
    ],
    "decode steps of qwen3-4b": [step("qwen3-4b", 32, 69.0)],
    "idle": [{"idle_percent": 2.0, "rows_per_step": 63.5}],
    "offline": [
        {"engine": "ceiling", "output_tokens_per_s": 60.0},
        {
            "engine": "tandem",
            "finished": True,
            "output_tokens_per_s": 30.0,
            "share_of_ceiling": 0.5,
        },
        {
            "engine": "transformers",
            "finished": False,
            "output_tokens_per_s": 10.0,
            "share_of_ceiling": 0.2,
        },
    ],
    "serve": [{"asked": 8, "answered": 8}, {"asked": 9, "answered": 7}],
    "recovery": [
        {"kill": 1, "device_gb_held": 3.0, "memory_back_s": 0.4, "all_go_on_s": 6.5},
        {"kill": 2, "device_gb_held": 3.0, "memory_back_s": None, "all_go_on_s": 5.0},
        {"kills": 2, "failed": 0, "different": 0},
    ],
    "tokens": [
        {"dtype": "float32", "first_differences": 1, "beyond_margin": 0},
        {"dtype": "float32", "first_differences": 0, "beyond_margin": 0},
        {"dtype": "bfloat16", "first_differences": 9, "beyond_margin": 7},
    ],
}


def passed(rows=ROWS) -> list[Outcome]:
    return [
        Outcome(name=name, status="passed", seconds=1.0, rows=found) for name, found in rows.items()
    ]


class TestAims:
    def test_what_was_measured_is_judged(self):
        """
        Each aim takes the rows that belong to it: the worst, a sum, or the fastest of FlashInfer's ways.
        """
        found = {aim.text: (aim.found, aim.verdict) for aim in aims(passed())}
        expected = {
            "decode attention from 32 rows on": (84.0, "missed"),
            "decode attention, times the speed of FlashInfer": (0.9, "missed"),
            "8B decode step": (80.0, "reached"),
            "Qwen3-4B decode step": (69.0, "missed"),
            "1B decode step": (None, "not measured"),
            "captured decode steps, times": (1.5, "incomplete"),
            "prefill attention": (399.0, "missed"),
            "device idle": (2.0, "reached"),
            "256 requests offline, share": (0.5, "missed"),
            "256 requests offline, times": (3.0, "reached"),
            "requests through both services": (2.0, "missed"),
            "executors killed": (2.0, "missed"),
            "streams over killed executors": (0.0, "reached"),
            "killed executors whose device memory": (1.0, "missed"),
            "float32 requests with a token unlike": (1.0, "missed"),
            "float32 tokens unlike": (0.0, "reached"),
        }
        assert len(expected) == len(found)
        for (text, judged), (begin, wanted) in zip(found.items(), expected.items(), strict=True):
            assert text.startswith(begin)
            assert wanted == (judged[0] and pytest.approx(judged[0]), judged[1])

    def test_worst_shape_is_named_with_the_number_of_those_measured(self):
        """
        An aim over shapes says how many of those asked for were measured, and which was worst.
        """
        found = {aim.text.partition(",")[0]: aim.basis for aim in aims(passed())}
        assert "2 of 24 measured; worst: B=32 ctx=1024" == found["decode attention from 32 rows on"]
        assert "1 of 40 measured; worst: llama-8b B=32 ctx=1024" == found["captured decode steps"]
        assert (
            "2 of 3 measured; worst: N=4 len=4096 heads=32/8x128"
            == found["prefill attention of long prompts"]
        )

    @pytest.mark.parametrize(("number", "verdict"), [(23, "incomplete"), (24, "reached")])
    def test_aim_is_reached_by_all_its_shapes_alone(self, number, verdict):
        """
        With one shape fewer than asked for, an aim that all others reach is incomplete.
        """
        rows = [decode(f"B=32 ctx={place}", "tandem", 1.0, 90.0) for place in range(number)]
        found, *_ = aims(passed({"decode attention": rows}))
        assert verdict == found.verdict

    def test_loads_that_were_not_run_leave_an_aim_open(self):
        """
        Clients that were answered at some of the loads alone do not reach the aim of all.
        """
        rows = [{"asked": 8, "answered": 8}] * 3
        (found,) = (aim for aim in aims(passed({"serve": rows})) if "both services" in aim.text)
        assert ("incomplete", "3 of 4 measured") == (found.verdict, found.basis)

    def test_shapes_that_aims_rest_on_are_those_of_the_parts(self):
        """
        The numbers of shapes are those that the benchmarks and scripts have with the plan's flags.
        """
        batches = list(kernels._batches(kernels.GRIDS["cuda", True]))
        decodes = [rows for operation, rows in batches if operation == "decode"]
        prompts = [rows for operation, rows in batches if operation == "prefill"]
        assert DECODES == len({rows.text for rows in decodes})
        assert WIDE_DECODES == sum(len(rows.query_len) >= WIDE_ROWS for rows in decodes)
        assert LONG_PROMPTS == sum(rows.query_len[0] >= LONG_PROMPT for rows in prompts)
        parts = [part for group in groups_on_gpu(Path()) for part in group.parts]
        steps = [part for part in parts if part.name.startswith("decode steps")]
        contexts = decode_steps.GRIDS["cuda", True].contexts
        given = [decode_steps._parser().parse_args(part.arguments[3:]) for part in steps]
        assert CAPTURED_STEPS == sum(len(one.beside_eager) * len(contexts) for one in given)
        assert LOADS == len(serve._parser().parse_args([]).concurrency)

    def test_nothing_is_judged_that_was_not_measured(self):
        """
        Without outcomes no aim is reached or missed.
        """
        assert {"not measured"} == {aim.verdict for aim in aims([])}

    def test_rows_of_another_version_are_not_judged(self):
        """
        Rows that lack what an aim is about, as an older command may have left them, do not count.
        """
        strange = {name: [{"x": 1}] for name in ROWS}
        assert {"not measured"} == {aim.verdict for aim in aims(passed(strange))}
        assert [] == beside_flashinfer(passed(strange)) + beside_eager(passed(strange))

    def test_engine_that_did_not_finish_has_no_share(self):
        """
        The rate of an engine that ran out of time is no rate, and is not held against a ceiling.
        """
        late = [
            {
                "engine": "tandem",
                "finished": False,
                "output_tokens_per_s": 3.0,
                "share_of_ceiling": 1.0,
            }
        ]
        late.append({"engine": "transformers", "finished": False, "output_tokens_per_s": None})
        found = [aim.found for aim in aims(passed({"offline": late})) if "offline" in aim.text]
        assert [None, None] == found

    def test_rate_of_an_engine_that_never_began_is_not_compared(self):
        """
        Where transformers ran out of time before its timed part, nothing is said about its rate.
        """
        ours, theirs = ROWS["offline"][1:]
        rows = [ours, {**theirs, "output_tokens_per_s": None}]
        (found,) = (aim for aim in aims(passed({"offline": rows})) if "transformers" in aim.text)
        assert "not measured" == found.verdict

    def test_idle_share_of_smaller_steps_is_not_judged(self):
        """
        A share that was measured while steps had fewer than 64 rows is not held against the aim.
        """
        row = {"idle_percent": 2.0, "rows_per_step": 62.0}
        (found,) = (aim for aim in aims(passed({"idle": [row]})) if "device idle" in aim.text)
        assert "not measured" == found.verdict

    def test_memory_that_was_not_watched_is_not_judged(self):
        """
        Kills on a machine without a device say nothing about a device's memory.
        """
        kills = [{"kill": 1, "device_gb_held": None, "memory_back_s": None}]
        (found,) = (aim for aim in aims(passed({"recovery": kills})) if "device memory" in aim.text)
        assert "not measured" == found.verdict


class TestComparisons:
    def test_shapes_that_flashinfer_ran_are_beside_its_fastest(self):
        """
        A shape has our time, its share of the copy bandwidth, and FlashInfer's fastest time over ours.
        """
        one, other = beside_flashinfer(passed())
        assert ("B=1 ctx=1024", 10.0, 10.0, 9.0) == tuple(one.values())[:4]
        assert ("B=64 ctx=1024", 13.0) == (other["shape"], other["FlashInfer us"])
        # A quotient of the two.
        assert one["times FlashInfer"] == pytest.approx(0.9)

    def test_steps_with_both_times_are_beside_each_other(self):
        """
        A step that was measured without a graph too has both times and their ratio.
        """
        row, _ = beside_eager(passed())
        assert ["llama-8b", 32, 1024, 32, 2.0, 3.0, 1.5] == list(row.values())


class TestPage:
    def test_page_says_what_was_not_run(self, tmp_path):
        """
        The page has each part with what it found, and of those that did not pass the reason.
        """
        made = {"at": "then", "commit": "abc", "device": "none"}
        outcomes = [
            Outcome(
                name="idle",
                status="passed",
                seconds=1.0,
                rows=[{"idle_percent": 4.0, "rows_per_step": 64.0, "rows": None}],
                made=made,
            ),
            Outcome(
                name="off line", status="skipped", seconds=0.0, detail="3 s were left", log="oh"
            ),
        ]
        about = {"device": "none"}
        results = Results(about=about, is_tiny=False, outcomes=outcomes)
        page = write_results(tmp_path, results).read_text()
        assert "| idle | passed | 1.0 | 1 rows | then | abc | none |" in page
        assert "through gRPC, % | at most 3 | 4 | - | missed |" in page
        assert "skipped:\n\n```\n3 s were left\n```" in page
        assert "| 4 | 64 | - |" in page
        assert "off line: skipped\noh\n" == (tmp_path / "logs/off-line.txt").read_text()

    def test_recovery_time_is_told_beside_the_aims(self, tmp_path):
        """
        The longest time until all streams went on is told without a verdict; none if some stream never did.
        """
        results = Results(about={}, is_tiny=False, outcomes=passed())
        page = write_results(tmp_path, results).read_text()
        assert "| longest time until all streams go on after a kill, s | 6.5 | 2 kills |" in page
        kills = [{"kill": 1, "all_go_on_s": 6.5}, {"kill": 2, "all_go_on_s": None}]
        assert [None] == [row["found"] for row in facts(passed({"recovery": kills}))]
        assert [] == facts([])

    def test_tiny_run_judges_nothing(self, tmp_path):
        """
        A page of tiny sizes has no aims.
        """
        results = Results(about={}, is_tiny=True, outcomes=passed())
        assert "## Aims" not in write_results(tmp_path, results).read_text()


class TestMerging:
    def test_outcomes_of_an_earlier_command_are_read_back(self, tmp_path):
        """
        The next command begins with all outcomes that were written, each with when and of which commit it was made.
        """
        made = {"at": "2030-01-01T00:00:00+00:00", "commit": "abc", "device": "H100"}
        written = [
            Outcome(name=name, status="passed", seconds=2.5, rows=[{"x": None}], made=made)
            for name in ("idle", "serve")
        ]
        write_results(tmp_path, Results(about={}, is_tiny=False, outcomes=written))
        assert written == earlier_outcomes(tmp_path, is_tiny=False)
        assert [] == earlier_outcomes(tmp_path / "elsewhere", is_tiny=False)

    def test_part_that_runs_again_replaces_its_older_outcome(self):
        """
        Each part has its latest outcome, failed or not, in its old place; new parts follow.
        """
        earlier = [Outcome(name=name, status="passed", seconds=1.0) for name in ("a", "b")]
        later = [Outcome(name=name, status="failed", seconds=2.0) for name in ("c", "a")]
        found = merged(earlier, later)
        assert [("a", "failed"), ("b", "passed"), ("c", "failed")] == [
            (outcome.name, outcome.status) for outcome in found
        ]

    def test_part_that_was_skipped_leaves_what_was_found_before(self):
        """
        A part for which there was no time this time keeps its older outcome; without one it is told as skipped.
        """
        earlier = [Outcome(name="a", status="passed", seconds=1.0)]
        later = [Outcome(name=name, status="skipped", seconds=0.0) for name in ("a", "b")]
        assert ["passed", "skipped"] == [outcome.status for outcome in merged(earlier, later)]

    @pytest.mark.parametrize("text", ["", "[]", '{"parts": [{}], "tiny": false}', '{"parts": 3}'])
    def test_results_that_cannot_be_read_are_refused(self, tmp_path, text):
        """
        A file that is no earlier run's is neither added to nor written over.
        """
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(UnfitResults, match="cannot be read"):
            earlier_outcomes(tmp_path, is_tiny=False)

    def test_results_of_other_sizes_are_refused(self, tmp_path):
        """
        Tiny sizes and those of a GPU are not mixed on one page.
        """
        write_results(tmp_path, Results(about={}, is_tiny=True, outcomes=[]))
        with pytest.raises(UnfitResults, match="results of tiny sizes and this run has full"):
            earlier_outcomes(tmp_path, is_tiny=False)
        assert {"about", "tiny", "parts"} == set(
            json.loads((tmp_path / "results.json").read_text())
        )
