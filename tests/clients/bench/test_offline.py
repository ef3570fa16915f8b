"""The comparison of engines: what it runs, measures and prints, not how long anything takes."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from executor_svc.model.config import read_model_config
from executor_svc.model.loader import load_model
from tandem.engine_config import EngineConfig
from tandem.process.printing_commands import run_printing
from tandem_bench.__main__ import main
from tandem_bench.device.shapes import model_config
from tandem_bench.device.sizes import MODEL_SIZES, ModelSizes
from tandem_bench.offline import checkpoints
from tandem_bench.offline import command as offline
from tandem_bench.offline.checkpoints import random_model, stored_tensors
from tandem_bench.offline.engines import ENGINES, Entry, linear_floor
from tandem_bench.offline.engines.embedded import EmbeddedContestant
from tandem_bench.offline.rounds import EngineFailed, Rounds, engines_in_turn, run_engine
from tandem_bench.offline.workload import Served, Task
from tandem_embedded import InferenceEngine
from tests.executor_svc.stepping import Bench, Row, batch, random_tokens

KEYS = ["engine", "concurrency", "output_tokens_per_s", "decode_tokens_per_s"]
TINY = ModelSizes(
    num_layers=2,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=96,
    max_positions=64,
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return random_model("tiny", TINY, tmp_path_factory.mktemp("cache"))


def line(concurrency: int, rate: float, tokens: list[int]) -> str:
    return json.dumps(
        {
            "concurrency": concurrency,
            "output_tokens_per_s": rate,
            "decode_tokens_per_s": 2 * rate,
            "tokens": [tokens] if tokens else [],
        }
    )


@pytest.fixture
def faked(monkeypatch):
    """Replace engines by ones that answer at once, by name; gives the tasks they were given."""
    given: list[Task] = []

    def run(task: Task):
        given.append(task)
        if task.engine == "transformers":
            raise EngineFailed("transformers failed: no memory")
        for concurrency in task.concurrency:
            yield line(concurrency, 10.0 * len(given), [1, 2, 3])

    monkeypatch.setattr(offline, "run_engine", run)
    return given


class TestFlags:
    def test_by_default_all_engines_serve_1_8_and_32_requests_in_three_rounds(
        self, faked, model_dir, monkeypatch, capsys
    ):
        """
        Without flags each engine gets 1, 8 and 32 requests of 128 tokens in and 64 out, three
        times in turn.
        """
        monkeypatch.setattr(offline, "random_model", lambda _name, _shape: model_dir)
        monkeypatch.setattr(offline, "ENGINES", {"tandem": ENGINES["tandem"], "b": Entry("b")})
        assert 2 == main(["offline", "--json"])
        assert "128 tokens in and 64 out are more than the 64 positions" in capsys.readouterr().err
        assert 0 == main(["offline", "--json", "--input-len", "8", "--output-len", "8"])
        assert ["tandem", "b"] * 3 == [task.engine for task in faked]
        assert {(1, 8, 32)} == {task.concurrency for task in faked}
        defaults = offline._parser().parse_args([])
        assert (128, 64, "llama-135m") == (
            defaults.input_len, defaults.output_len, defaults.shape,
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("flags", "why"),
        [
            (["--output-len", "1"], "at least 2"),
            (["--concurrency", "0"], "at least 1"),
            (["--engine", "vllm"], "invalid choice"),
            (["--shape", "llama-135m", "--model", "x"], "not allowed with"),
        ],
        ids=["one-token", "no-requests", "unknown-engine", "two-models"],
    )
    def test_wrong_flag_is_a_usage_error(self, flags, why, capsys):
        """
        A command that cannot measure ends with 2 and a sentence, before anything is loaded.
        """
        with pytest.raises(SystemExit) as ended:
            main(["offline", *flags])
        assert 2 == ended.value.code
        assert why in capsys.readouterr().err

    def test_model_that_is_none_is_said(self, capsys, tmp_path):
        """
        A directory without a model ends with 2 and names the directory.
        """
        assert 2 == main(["offline", "--model", str(tmp_path)])
        assert str(tmp_path) in capsys.readouterr().err


class TestInterruption:
    def test_what_was_measured_is_printed(self, model_dir, monkeypatch, capsys):
        """
        Ctrl-C ends with 130, and what was measured until then is printed.
        """
        before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

        def run(task: Task):
            yield line(1, 10.0, [1])
            signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(offline, "run_engine", run)
        monkeypatch.setattr(offline, "ENGINES", {"tandem": ENGINES["tandem"]})
        flags = ["--model", str(model_dir), "--input-len", "8", "--output-len", "8", "--json"]
        try:
            with pytest.raises(SystemExit, match="130"):
                run_printing("bench", lambda: main(["offline", *flags]))
        finally:
            signal.signal(signal.SIGINT, before[0])
            signal.signal(signal.SIGTERM, before[1])
        printed = capsys.readouterr()
        assert [10.0] == [rates["output_tokens_per_s"] for rates in json.loads(printed.out)]
        assert "interrupted" in printed.err


class TestMissingPeers:
    @pytest.fixture(autouse=True)
    def nothing_installed(self, monkeypatch):
        engines = {
            "tandem": ENGINES["tandem"],
            "llama.cpp": Entry("llama", ("no_such_module",), "pip install it"),
        }
        monkeypatch.setattr(offline, "ENGINES", engines)

    def test_engine_that_was_asked_for_is_an_error(self, capsys):
        """
        --engine with one that is not installed ends with 2 and says what to install.
        """
        with pytest.raises(SystemExit) as ended:
            main(["offline", "--engine", "llama.cpp"])
        assert 2 == ended.value.code
        assert "llama.cpp needs no_such_module: pip install it" in capsys.readouterr().err

    def test_engine_of_the_default_is_left_out_aloud(self, faked, model_dir, capsys):
        """
        Without --engine, one that is not installed is named on stderr, and the others run.
        """
        flags = ["--model", str(model_dir), "--input-len", "8", "--output-len", "8", "--json"]
        assert 0 == main(["offline", *flags, "--rounds", "1"])
        printed = capsys.readouterr()
        assert "llama.cpp needs no_such_module" in printed.err
        assert {"tandem"} == {entry["engine"] for entry in json.loads(printed.out)}


class TestResults:
    FLAGS = ("--input-len", "8", "--output-len", "8", "--rounds", "2", "--concurrency", "1", "4")

    def test_json_is_one_list_with_four_keys(self, faked, model_dir, capsys):
        """
        --json prints one list with an entry per engine and number of requests: their names, and
        medians over the rounds.
        """
        engines = ["--engine", "tandem", "linear-floor"]
        assert 0 == main(["offline", "--json", "--model", str(model_dir), *self.FLAGS, *engines])
        printed = json.loads(capsys.readouterr().out)
        assert [KEYS] * 4 == [list(entry) for entry in printed]
        assert ["tandem", 1, 20.0, 40.0] == list(printed[0].values())
        assert ["linear-floor", 4, 30.0, 60.0] == list(printed[3].values())

    def test_engine_that_fails_is_said_and_the_others_are_printed(self, faked, model_dir, capsys):
        """
        An engine that fails is not run again, its error is on stderr and the exit code 1.
        """
        engines = ["--engine", "tandem", "transformers"]
        assert 1 == main(["offline", "--json", "--model", str(model_dir), *self.FLAGS, *engines])
        printed = capsys.readouterr()
        assert "transformers failed: no memory" in printed.err
        assert ["tandem", "transformers", "tandem"] == [task.engine for task in faked]
        assert {"tandem"} == {entry["engine"] for entry in json.loads(printed.out)}

    def test_table_compares_with_the_floor_and_with_our_tokens(self, faked, model_dir, capsys):
        """
        The table gives each engine's decode rate as a share of the floor's, and how many tokens of
        the first request are ours.
        """
        engines = ["--engine", "tandem", "transformers-generate", "linear-floor"]
        assert 0 == main(["offline", "--model", str(model_dir), *self.FLAGS, *engines])
        rows = [row.split() for row in capsys.readouterr().out.splitlines()[2:]]
        assert ["tandem", "1", "25.0", "50.0", "0.50", "3", "of", "3"] == rows[0]
        assert ["transformers-generate", "linear-floor"] == [rows[2][0], rows[4][0]]

    def test_tokens_are_compared_up_to_the_first_that_differs(self):
        """
        After two outputs part they are two texts: what happens to be equal later does not count.
        """
        found = Rounds()
        found.add("tandem", line(1, 1.0, [5, 6, 7, 8]))
        found.add("other", line(1, 1.0, [5, 6, 9, 8]))
        found.add("linear-floor", line(1, 1.0, []))
        assert (2, 4) == found.num_equal("other", 1)
        assert found.num_equal("linear-floor", 1) is None

    def test_rates_are_of_all_time_and_of_the_time_in_which_all_decode(self):
        """
        Output tokens are over the whole time, decode tokens are those after each request's first,
        over the time after that.
        """
        served = Served(
            tokens=(), num_tokens=40, started_s=10.0, all_decode_s=12.0, num_before=10, ended_s=15.0
        )
        assert (8.0, 10.0) == (served.output_tokens_per_s, served.decode_tokens_per_s)

    def test_rounds_take_engines_in_turn(self):
        """
        Each round runs every engine once, so that a slow while of the machine hits all.
        """
        assert [(1, "a"), (1, "b"), (2, "a"), (2, "b")] == list(engines_in_turn(["a", "b"], 2))


class TestTask:
    def test_task_survives_the_way_to_its_process(self):
        """
        A task reads from the command line as it was written to it.
        """
        task = Task(
            engine="tandem", model=Path("/a b"), dtype="float32", num_threads=2,
            concurrency=(1, 8), input_len=3, output_len=4,
        )  # fmt: skip
        assert task == Task.from_json(task.to_json())

    def test_warm_up_has_other_prompts(self):
        """
        No prompt of the measurement is seen before it, so that no prefix cache can serve it.
        """
        task = Task(
            engine="", model=Path(), dtype="", num_threads=1,
            concurrency=(2,), input_len=16, output_len=4,
        )  # fmt: skip
        measured, before = task.workload(2).prompts(100), task.warm_up(2).prompts(100)
        assert measured != before
        assert task.workload(2).prompts(100) == measured
        assert (2, 16) == (len(measured), len(measured[0]))
        assert all(0 <= token < 100 for prompt in measured for token in prompt)

    @pytest.mark.slow
    def test_process_that_fails_says_why(self, model_dir):
        """
        An engine that cannot serve its task is an error with its name and its process's last words.
        """
        task = Task(
            engine="linear-floor", model=model_dir / "none", dtype="float32", num_threads=1,
            concurrency=(1,), input_len=4, output_len=4,
        )  # fmt: skip
        with pytest.raises(
            EngineFailed, match=r"^linear-floor failed: model directory .*none does not exist"
        ):
            list(run_engine(task))


class TestEmbedded:
    @pytest.mark.slow
    def test_requests_that_end_before_others_begin_are_counted(self, model_dir):
        """
        All outputs are there even if early requests end before the last one has a token.
        """
        limits = EngineConfig(
            block_size=8, max_num_blocks=16, max_batch_size=3, max_num_seqs=3, max_model_len=32,
            max_total_tokens=8,
        )  # fmt: skip
        engine = InferenceEngine(limits, model_dir, dtype="float32", num_threads=1)
        prompts = [[number] * 8 for number in (5, 6, 7)]
        served = EmbeddedContestant(engine).serve(prompts, 2)
        assert 6 == served.num_tokens
        assert [2, 2, 2] == [len(tokens) for tokens in served.tokens]


class TestCheckpoint:
    def test_shape_is_what_is_loaded(self, model_dir):
        """
        A random model has the sizes of its shape, and weights with the deviation it says.
        """
        config = read_model_config(model_dir)
        assert (2, 32, 48, 4, 2, 96) == (
            config.num_layers, config.hidden_size, config.intermediate_size,
            config.num_heads, config.num_kv_heads, config.vocab_size,
        )  # fmt: skip
        weights = load_model(model_dir, dtype="float32", device="cpu").weights
        assert weights.lm_head is weights.embedding
        assert 0.015 < float(weights.embedding.std()) < 0.025

    def test_model_is_written_once(self, model_dir):
        """
        The second use of a shape takes the files of the first.
        """
        stored = model_dir / "model.safetensors"
        before = stored.stat().st_mtime_ns
        assert model_dir == random_model("tiny", TINY, model_dir.parent)
        assert before == stored.stat().st_mtime_ns

    def test_model_of_a_quicker_process_is_kept(self, tmp_path, monkeypatch):
        """
        A model that another process has written meanwhile, and may be reading, stays.
        """
        write, quicker = checkpoints._write, []

        def write_late(sizes, directory):
            write(sizes, directory)
            monkeypatch.setattr(checkpoints, "_write", write)
            stored = random_model("tiny", TINY, tmp_path) / "model.safetensors"
            quicker.append(stored.stat().st_ino)

        monkeypatch.setattr(checkpoints, "_write", write_late)
        late = random_model("tiny", TINY, tmp_path)
        assert quicker == [(late / "model.safetensors").stat().st_ino]
        assert [late] == list(tmp_path.iterdir())

    def test_model_of_other_sizes_is_replaced(self, tmp_path):
        """
        A directory that holds a model of other sizes under the same name gets the one asked for.
        """
        random_model("tiny", replace(TINY, num_layers=1), tmp_path)
        assert 2 == read_model_config(random_model("tiny", TINY, tmp_path)).num_layers

    def test_smallest_shape_has_135_million_weights(self):
        """
        The default shape is that of a 135M Llama with tied embeddings.
        """
        tensors = stored_tensors(MODEL_SIZES["llama-135m"])
        assert 134_515_008 == sum(torch.Size(shape).numel() for shape in tensors.values())

    def test_model_that_normalises_queries_and_keys_is_loaded(self, tmp_path):
        """
        A model written for any sizes is, once read, the one that the executor's benchmarks compute.
        """
        sizes = replace(TINY, qk_norm=True, tied_embeddings=False)
        model = load_model(random_model("other", sizes, tmp_path), dtype="float32", device="cpu")
        expected = replace(model_config(sizes), eos_token_ids=model.config.eos_token_ids)
        assert expected == model.config


class _Products(TorchDispatchMode):
    """Mode that notes rows, width and weight of every matrix product, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in {"mm", "addmm", "addmm_", "linear"}:
            rows = next(each for each in args[-2:] if each.shape[0] == result.shape[0])
            self.seen.append((*rows.shape, result.shape[1]))
        return result


class TestFloor:
    @pytest.mark.parametrize("num_rows", [1, 5])
    def test_floor_multiplies_what_a_decode_step_multiplies(self, model_dir, num_rows):
        """
        The floor's products of a decode are those of the model's step: as many, in that order, of
        the same sizes.
        """
        bench, seen = Bench.build(model_dir, dtype="float32", max_model_len=32), _Products()
        admits = [bench.admit(slot, random_tokens(4, seed=slot)) for slot in range(num_rows)]
        bench.runner.execute(
            batch(*(Row(slot, 0, 4) for slot in range(num_rows)), admits=admits), 1
        )
        with seen:
            bench.runner.execute(batch(*(Row(slot, 4) for slot in range(num_rows))), 2)
        floor = linear_floor.LinearFloor(load_model(model_dir, dtype="float32", device="cpu"))
        expected = [
            (*rows.shape, len(weight)) for rows, weight in floor._inputs(num_rows, num_rows)
        ]
        assert expected == seen.seen
        assert 4 * TINY.num_layers + 1 == len(expected)


@pytest.mark.slow
class TestRealEngines:
    def test_tandem_and_floor_are_measured_in_their_processes(self, model_dir, capsys):
        """
        A tiny model is served by the embedded engine and multiplied by the floor, each in its own
        process, and both have rates.
        """
        flags = ["--engine", "tandem", "linear-floor", "--concurrency", "1", "3"]
        lengths = ["--input-len", "8", "--output-len", "5", "--rounds", "1", "--threads", "1"]
        assert 0 == main(["offline", "--json", "--model", str(model_dir), *flags, *lengths])
        printed = json.loads(capsys.readouterr().out)
        expected = [("tandem", 1), ("tandem", 3), ("linear-floor", 1), ("linear-floor", 3)]
        assert expected == [(entry["engine"], entry["concurrency"]) for entry in printed]
        assert all(entry["output_tokens_per_s"] > 0 for entry in printed)

    def test_transformers_gives_the_tokens_of_the_embedded_engine(self, model_dir):
        """
        Both engines of transformers answer the same prompts with the same greedy tokens.
        """
        task = Task(
            engine="tandem", model=model_dir, dtype="float32", num_threads=1,
            concurrency=(2,), input_len=12, output_len=6,
        )  # fmt: skip
        found = Rounds()
        for engine in ("tandem", "transformers", "transformers-generate"):
            for each in run_engine(task.of(engine)):
                found.add(engine, each)
        assert (6, 6) == found.num_equal("transformers", 2)
        assert (6, 6) == found.num_equal("transformers-generate", 2)
