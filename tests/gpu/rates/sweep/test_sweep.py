"""The candidates, choices and tables of the sweep of tunings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kernels.linear.tuning import LinearTiles, cut
from kernels.paged_attention.triton_prefill_tiles import INVARIANT_TILES, SHORT_ROWS, TileSize
from kernels.paged_attention.tuning import DECODE_TILES, DecodeTuning
from kernels.sampling.tuning import TILES as SAMPLING_TILES
from kernels.sampling.tuning import SamplingTiles
from tests.gpu.parts import EXIT_NO_DEVICE, ROOT
from tests.gpu.rates.sweep import __main__ as sweep_command
from tests.gpu.rates.sweep import run as sweep_run
from tests.gpu.rates.sweep.candidates import first_round, second_round
from tests.gpu.rates.sweep.choice import choose
from tests.gpu.rates.sweep.compiling import Compiled, judge
from tests.gpu.rates.sweep.points import POINTS, SIZES, TINY, Point, check_points, kernel_sizes
from tests.gpu.rates.sweep.tables import TABLES, Key, present, source, sources
from tests.gpu.rates.sweep.work import Place, _lengths
from tests.gpu.rates.trace import __main__ as trace_command
from tests.kernels.triton.compiled import CompiledKernel

KEYS = pytest.mark.parametrize("key", POINTS, ids=str)
HEADS_128 = Key("decode", (128, 2))
SHORT, LONG = (
    Point(operation="decode", model="llama-8b", rows=rows, length=1024) for rows in (1, 256)
)
NOW = DECODE_TILES[128, 2]
OTHERS = [replace(NOW, tile=tile) for tile in (16, 32)]


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


class TestCandidates:
    @KEYS
    def test_each_round_has_distinct_ones_that_begin_with_the_present_entry(self, key):
        """
        The present entry is always timed, and nothing is timed twice.
        """
        first = first_round(key)
        later = second_round(key, first[-1])
        assert present(key) == first[0]
        assert len(first) == len(set(first)) > 1
        assert len(later) == len(set(later))
        assert not {present(key), first[-1]} & set(later)

    @KEYS
    def test_all_keep_to_what_kernels_demand(self, key):
        """
        Sizes are powers of two; chunks and splits are whole tiles, and tiles hold a group of heads.
        """
        for found in [*first_round(key), *second_round(key, present(key))]:
            match found:
                case DecodeTuning():
                    assert is_power_of_two(found.tile)
                    assert 0 == found.min_chunk % found.tile
                    assert found.programs_per_multiprocessor >= 1
                case TileSize():
                    assert is_power_of_two(found.rows)
                    assert is_power_of_two(found.keys)
                    assert min(found.rows, found.keys) >= 16
                    assert found.rows >= SHORT_ROWS or key.operation == "prefill_invariant"
                case LinearTiles():
                    assert all(map(is_power_of_two, (found.rows, found.columns, found.depth)))
                    assert cut(4096, found).num_parts <= found.most_parts
                case SamplingTiles():
                    assert is_power_of_two(found.tile)
                    assert 0 == found.split % found.tile

    def test_all_are_timed_within_six_minutes(self):
        """
        At 0.2 s each, the measurements of all points take less than five minutes.
        """
        count = sum(
            len(points) * (len(first_round(key)) + len(second_round(key, present(key))))
            for key, points in POINTS.items()
        )
        assert count * 0.2 < 300

    @pytest.mark.parametrize("points", [POINTS, TINY], ids=["device", "tiny"])
    def test_points_belong_to_their_entries(self, points):
        """
        Each entry's points are read by its table, with its head size.
        """
        for key, shapes in points.items():
            assert key.entry in TABLES[key.operation].entries
            for point in shapes:
                assert point.operation == key.operation
                head_dim = max(64, SIZES[point.model].head_dim)
                if key.operation == "decode":
                    assert (head_dim, 2) == key.entry
                if key.operation.startswith("prefill"):
                    assert head_dim == key.entry

    @pytest.mark.parametrize("points", [POINTS, TINY], ids=["device", "tiny"])
    def test_results_are_compared_with_every_kernel_of_an_entry(self, points):
        """
        Each model, weight and kind of sampling has a small point, with few rows and with many where it is timed with both.
        """
        for key, shapes in points.items():
            checks = check_points(shapes)
            assert {kernel_sizes(point) for point in shapes} == set(map(kernel_sizes, checks))
            assert {key.operation} == {point.operation for point in checks}
            for point in checks:
                assert 5 <= point.rows <= 300
                assert point.queries <= point.length <= 700

    def test_rows_of_a_comparison_differ_in_length(self):
        """
        The sequences of a comparison have other lengths, and prompts other new positions, than each other.
        """
        for key, shapes in POINTS.items():
            for point in [] if key.operation in {"linear", "sampling"} else check_points(shapes):
                new, whole = _lengths(point)
                assert len(set(whole)) > 1
                assert all(1 <= query <= length for query, length in zip(new, whole, strict=True))
                assert len(set(new)) > 1 or point.queries == 1

    def test_top_p_is_compared_before_a_tuning_of_sampling_wins(self):
        """
        Drawing with noise alone and under top_p are both compared with the definition.
        """
        for key in (key for key in POINTS if key.operation == "sampling"):
            assert {"noise", "top_p"} == {point.part for point in check_points(POINTS[key])}

    def test_tiles_of_invariant_attention_hold_any_group_that_the_models_have(self):
        """
        No candidate is too small for the heads that share a key head where it is timed.
        """
        for key, shapes in POINTS.items():
            if key.operation == "prefill_invariant":
                assert key.entry in INVARIANT_TILES
                groups = {
                    SIZES[point.model].num_heads // SIZES[point.model].num_kv_heads
                    for point in shapes
                }
                assert all(found.rows >= max(groups) for found in first_round(key))


class TestChoice:
    def test_least_weighted_time_wins(self):
        """
        Points count by their weights, however long they take: 10 % of a short one outweigh 5 % of a long one.
        """
        times = {
            SHORT: {NOW: 1.0, OTHERS[0]: 0.9, OTHERS[1]: 1.0},
            LONG: {NOW: 100.0, OTHERS[0]: 100.0, OTHERS[1]: 95.0},
        }
        found = choose(times, NOW)
        assert (OTHERS[0], 2) == (found.best, found.num_points)
        assert found.ratio == pytest.approx(0.95)
        heavy = {SHORT: times[SHORT], replace(LONG, weight=3.0): times[LONG]}
        assert OTHERS[1] == choose(heavy, NOW).best

    @pytest.mark.parametrize(("seconds", "best"), [(0.985, NOW), (0.97, OTHERS[0])])
    def test_present_entry_stays_within_two_percent(self, seconds, best):
        """
        A difference that repeated measurements have too changes no table.
        """
        found = choose({SHORT: {NOW: 1.0, OTHERS[0]: seconds}}, NOW)
        assert best == found.best
        assert found.ratio == (1.0 if best == NOW else seconds)

    def test_tuning_that_failed_at_a_point_does_not_count(self):
        """
        The best of one point loses if it could not be timed at the other.
        """
        found = choose(
            {SHORT: {NOW: 1.0, OTHERS[0]: 0.1, OTHERS[1]: 0.9}, LONG: {NOW: 1.0, OTHERS[1]: 0.9}},
            NOW,
        )
        assert OTHERS[1] == found.best

    def test_nothing_is_chosen_without_the_present_entry(self):
        """
        Times that cannot be compared with the present entry's give no choice.
        """
        assert choose({}, NOW) is None
        assert choose({SHORT: {OTHERS[0]: 1.0}}, NOW) is None


class TestSource:
    @pytest.mark.parametrize("operation", TABLES)
    def test_written_table_is_the_present_one_without_winners(self, operation):
        """
        The source that is printed gives the same entries when it is run.
        """
        names = {cls.__name__: cls for cls in (DecodeTuning, TileSize, LinearTiles, SamplingTiles)}
        table = TABLES[operation]
        exec(source(operation, {}), names)  # the source under test
        assert table.entries == names[table.name]

    def test_winner_takes_its_place(self):
        """
        Winners replace their entries, the others stay, and only their tables are written, file by file.
        """
        winner = replace(NOW, tile=32, max_registers=128, min_chunk=512, max_chunks=64)
        tiles = replace(SAMPLING_TILES[16], tile=256)
        text = sources({Key("sampling", 16): tiles, HEADS_128: winner})
        names = {"DecodeTuning": DecodeTuning, "SamplingTiles": SamplingTiles}
        exec(text, names)  # the source under test
        assert {**DECODE_TILES, (128, 2): winner} == names["DECODE_TILES"]
        assert {**SAMPLING_TILES, 16: tiles} == names["TILES"]
        assert text.startswith("# kernels/paged_attention/tuning.py\nDECODE_TILES: dict[")
        assert "\n\n# kernels/sampling/tuning.py\nTILES = {" in text
        assert max(map(len, text.splitlines())) <= 100


def compiled(**changes: int) -> CompiledKernel:
    sizes = {"registers": 100, "stack_bytes": 0, "local_bytes": 0, "shared_bytes": 1000}
    return CompiledKernel(name="decode_kernel", ptx="", **{**sizes, **changes})


class TestFilter:
    @pytest.mark.parametrize(
        ("launches", "problem"),
        [
            ([[compiled()], [compiled(), compiled(registers=255)]], ""),
            ([[compiled()], [compiled(stack_bytes=8)]], "decode_kernel spills registers"),
            ([[compiled(shared_bytes=232448)]], "232448 bytes of shared memory"),
            ([[compiled()], "PTXASError: no"], "PTXASError: no"),
        ],
        ids=["fits", "spills", "too-large", "fails"],
    )
    def test_candidate_that_cannot_run_well_is_dropped_with_its_reason(self, launches, problem):
        """
        Spills, too much shared memory and errors of the compiler at any point end a candidate.
        """
        assert problem == judge(launches).problem


class TestComparison:
    def test_candidate_that_is_wrong_for_one_model_is_dropped(self, monkeypatch):
        """
        A tuning whose results are right for an entry's first model and wrong for another is not timed, and the row says where.
        """
        right, wrong = first_round(HEADS_128)[:2]

        def make_work(point, _place):
            def error(tuning):
                return 2.0 if (point.model, tuning) == ("qwen3-0.6b", wrong) else 0.5

            return SimpleNamespace(
                call=lambda tuning: lambda: torch.tensor(error(tuning)),
                same_bits=lambda _: [],
                worst_error=torch.Tensor.item,
            )

        monkeypatch.setattr(sweep_run, "make_work", make_work)
        monkeypatch.setattr(
            sweep_run, "results", lambda tunings, _key: [(t, Compiled()) for t in tunings]
        )
        rows = []
        options = sweep_run.Options(budget_s=1, deadline_s=0)
        place = Place(torch.device("cpu"), torch.float32)
        found = sweep_run.Sweep(place, None, options, rows.append)
        assert [right] == found._usable(HEADS_128, POINTS[HEADS_128], [right, wrong])
        assert ["", "qwen3-0.6b B=5 q=1 len=700: results are wrong"] == [
            row["problem"] for row in rows
        ]


def sweep(*arguments: str) -> list[dict]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.gpu.rates.sweep"),
            *("--device", "cpu", "--tiny", "--processes", "1", *arguments),
        ],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    return json.loads(done.stdout)


class TestRefusals:
    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
    @pytest.mark.parametrize("command", [sweep_command, trace_command])
    def test_no_device_is_one_line(self, command, capsys):
        """
        Without a GPU both commands print one line that says how to try them, and end with 3.
        """
        assert EXIT_NO_DEVICE == command.main([])
        found = capsys.readouterr()
        assert not found.out
        assert 1 == found.err.count("\n")
        assert "--device cpu --tiny" in found.err

    def test_operations_that_can_be_named_are_those_of_the_tables(self):
        """
        The names on the command line are those of the tables, and another is refused.
        """
        assert set(sweep_command.OPERATIONS) == set(TABLES)
        with pytest.raises(SystemExit):
            sweep_command.main(["--operation", "foo"])


@pytest.mark.slow
class TestCommand:
    def test_candidates_are_checked_timed_and_judged(self, tmp_path):
        """
        Interpreted kernels of each operation are compared with their definitions and timed, and
        the tables are written.
        """
        path = tmp_path / "tables.py"
        bounds = ("--most", "1", "--seconds", "0.001", "--limit-s", "600")
        found = sweep(*bounds, "--write", str(path))
        assert not [row for row in found if row.get("problem")]
        assert all(row["us"] > 0 for row in found if row["kind"] == "time")
        assert set(TABLES) == {key.operation for key in TINY}
        for key in TINY:
            rows = [row for row in found if row["key"] == str(key)]
            kinds = Counter(row["kind"] for row in rows)
            assert kinds["compiled"] > 1
            assert kinds["time"] > 1
            assert 1 == kinds["best"]
            assert f"\n{TABLES[key.operation].name}" in f"\n{path.read_text()}"

    def test_run_without_time_leaves_all_out(self):
        """
        After its limit a sweep names what it did not do, of the operations that were asked for, and
        ends.
        """
        asked = ("linear", "decode")
        rows = sweep("--limit-s", "0", "--compile-only", "--most", "0", "--operation", *asked)
        left_out = [str(key) for key in TINY if key.operation in asked]
        assert [{"kind": "left out", "key": key} for key in left_out] == rows
