"""The embedded engine over real, tiny models."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from tandem.engine_config import EngineConfig
from tandem_embedded import (
    ConfigError,
    CoreOptions,
    EngineMemoryError,
    ExecutionError,
    FinishReason,
    GenerationParams,
    InferenceEngine,
)
from tandem_embedded.__main__ import main
from tests.model_zoo import llama_mha
from tests.truth.equality import Comparison

PROMPTS = [f"The quick brown fox {number} jumps over" for number in range(4)]
SEEDED = GenerationParams(max_tokens=64, temperature=0.8, top_k=40, seed=7, ignore_eos=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return llama_mha(tmp_path_factory.mktemp("models") / "llama_mha")


def build(model_dir, **changes) -> InferenceEngine:
    limits = {
        "block_size": 8, "max_num_blocks": 128, "max_batch_size": 8, "max_model_len": 256,
        "max_total_tokens": 64, "memory_threshold": 1.0,
    }  # fmt: skip
    settings = {key: changes.pop(key) for key in ("window",) if key in changes}
    return InferenceEngine(
        EngineConfig(**(limits | changes)),
        model_dir,
        dtype="float32",
        num_threads=1,
        collect_margins=True,
        # No request is kept waiting for what others may need, so that short memory shows.
        options=CoreOptions(schedule_conservativeness=0.0),
        **settings,
    )


@pytest.fixture(scope="module")
def alone(model_dir):
    """Serve every prompt alone."""
    engine, served = build(model_dir), []
    for prompt in PROMPTS:
        engine.submit_request(prompt, SEEDED)
        served += engine.run()
    return served


class TestEqualTokens:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "changes",
        [
            {"window": 1},
            {"window": 2},
            {"window": 4},
            {"max_total_tokens": 9},
            {"block_size": 7},
            {"max_num_blocks": 20, "max_model_len": 128},
            {"max_num_blocks": 20, "max_model_len": 128, "window": 4},
        ],
        ids=lambda changes: "-".join(f"{name}{value}" for name, value in changes.items()),
    )
    def test_served_together_they_are_those_served_alone(self, model_dir, alone, changes):
        """
        Running ahead, chunks, block sizes and preemption change no token.
        """
        engine = build(model_dir, **changes)
        for prompt in PROMPTS:
            engine.submit_request(prompt, SEEDED)
        completed = sorted(engine.run(), key=lambda request: request.request_id)
        comparison = Comparison()
        for expected, found in zip(alone, completed, strict=True):
            comparison.check(
                expected.output_tokens, found.output_tokens, expected.margins, str(changes)
            )
            assert 64 == len(found.margins)
        comparison.assert_not_vacuous()
        if "max_num_blocks" in changes:
            assert engine.get_metrics().preemptions > 0
        assert 0 == engine.get_memory_stats().used_blocks

    def test_the_seed_told_reproduces_an_output(self, model_dir):
        """
        Submitting a request again with the seed it was given yields the same tokens.
        """
        engine = build(model_dir)
        engine.submit_request("hello", GenerationParams(max_tokens=12, temperature=1.5))
        first = engine.run()[0]
        again = GenerationParams(max_tokens=12, temperature=1.5, seed=first.seed)
        engine.submit_request("hello", again)
        assert first.output_tokens == engine.run()[0].output_tokens


class TestModelLimits:
    def test_without_limits_the_model_and_the_memory_decide(self, model_dir):
        """
        An engine that is told nothing takes the model's context, and KV memory in which as many of
        the longest requests fit as a step has rows, as a service does.
        """
        config = InferenceEngine(model_dir=model_dir, dtype="float32").config
        assert 512 == config.max_model_len
        assert config.max_num_blocks >= config.max_batch_size * 512 // config.block_size

    def test_without_limits_the_memory_can_still_be_sized(self, model_dir):
        """
        buffer_size_gb alone decides how many blocks there are.
        """
        config = InferenceEngine(model_dir=model_dir, dtype="float32", buffer_size_gb=0.001).config
        assert 2**30 // 1000 // (2 * 2 * 16 * 4 * 16 * 4) - 1 == config.max_num_blocks

    def test_a_default_length_gives_way_to_the_model(self, model_dir):
        """
        The default max_model_len of 2048 becomes the model's 512.
        """
        assert 512 == InferenceEngine(EngineConfig(), model_dir).config.max_model_len

    def test_a_length_that_was_set_does_not(self, model_dir):
        """
        A max_model_len over the model's own is refused.
        """
        with pytest.raises(ConfigError, match="at most 512 tokens"):
            InferenceEngine(EngineConfig(max_model_len=513), model_dir)

    @pytest.mark.parametrize("config", [EngineConfig(), None], ids=["limits", "none"])
    def test_a_model_shorter_than_a_block_is_refused_as_that(self, model_dir, tmp_path, config):
        """
        A model shorter than one block is refused with an error that says so.
        """
        short = shutil.copytree(model_dir, tmp_path / "short")
        content = json.loads((short / "config.json").read_text())
        (short / "config.json").write_text(json.dumps(content | {"max_position_embeddings": 8}))
        with pytest.raises(ConfigError, match=r"at most 8 tokens .* one block of block_size 16"):
            InferenceEngine(config, short)

    def test_blocks_that_do_not_fit_are_a_memory_error(self, model_dir):
        """
        A pool larger than memory is refused before any request.
        """
        with pytest.raises(EngineMemoryError, match=r"^Memory error: "):
            InferenceEngine(EngineConfig(max_num_blocks=10**9), model_dir)

    def test_the_models_eos_ends_a_request(self, tmp_path):
        """
        The end-of-sequence ids are those of the model directory, and ignore_eos ignores them.
        """
        greedy = GenerationParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        directory = llama_mha(tmp_path / "model")
        engine = build(directory)
        engine.submit_request("hello", greedy)
        outputs = engine.run()[0].output_tokens
        path = directory / "generation_config.json"
        path.write_text(json.dumps({"eos_token_id": [outputs[3]]}))
        engine = build(directory)
        engine.submit_request("hello", replace(greedy, ignore_eos=False))
        engine.submit_request("hello", greedy)
        ended, ignored = sorted(engine.run(), key=lambda request: request.request_id)
        assert FinishReason.EOS is ended.finish_reason
        assert outputs[: outputs.index(outputs[3]) + 1] == ended.output_tokens
        assert outputs == ignored.output_tokens

    def test_a_model_that_produces_nan_fails_its_requests(self, tmp_path):
        """
        Broken weights fail each request with an execution error that says so.
        """
        broken = llama_mha(tmp_path / "broken")
        _poison(broken)
        engine = build(broken)
        engine.submit_request("hello", SEEDED)
        error = engine.run()[0].error
        assert isinstance(error, ExecutionError)
        assert "NaN" in error.message


def _poison(model_dir) -> None:
    path = model_dir / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, path)


class TestCommandLine:
    def test_one_prompt_is_completed(self, model_dir, capsys):
        """
        The output goes to stdout; token count and memory go to stderr.
        """
        status = main(
            ["--model", str(model_dir), "--prompt", "hi", "--max-tokens", "5", "--seed", "1",
             "--ignore-eos", "--num-threads", "1"]
        )  # fmt: skip
        written = capsys.readouterr()
        assert 0 == status
        assert "Generated 5 tokens (MAX_TOKENS, seed 1)" in written.err
        assert "Memory usage: 0/1024 blocks (0.0%)" in written.err
        assert written.out.endswith("\n")

    @pytest.mark.parametrize(
        ("arguments", "status", "text"),
        [
            ([], 2, "give a prompt"),
            (["--prompt", "x", "--block-size", "0"], 2, "Config error: block_size must be"),
            (["--prompt", "x", "--config", "absent.json"], 2, "Config error: cannot read absent"),
            (["--prompt", "x", "--temperature", "3"], 1, "Validation error: temperature must be"),
            (["--prompt", ""], 1, "Validation error: the prompt is empty"),
        ],
        ids=["no-prompt", "limit", "file", "parameter", "empty"],
    )
    def test_mistakes_are_one_line_and_a_status(self, model_dir, capsys, arguments, status, text):
        """
        A mistake prints one line that says what to do, and exits 2 for the set-up, 1 for a request.
        """
        # Where C++ is wanted and cannot be had, a warning comes before.
        assert status == main(["--model", str(model_dir), "--cpu-extension", "off", *arguments])
        written = capsys.readouterr()
        assert text in written.err
        assert (1, "") == (written.err.count("\n"), written.out)

    def test_flags_win_over_the_file_over_the_preset(self, model_dir, tmp_path, capsys):
        """
        Limits come from defaults, then preset, then file, then flags.
        """
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"max_num_blocks": 99, "max_model_len": 128}))
        arguments = ["--model", str(model_dir), "--prompt", "x", "--max-tokens", "1"]
        sources = ["--preset", "low-latency", "--config", str(path), "--max-num-blocks", "77"]
        assert 0 == main([*arguments, *sources])
        assert "0/77 blocks" in capsys.readouterr().err
        assert 0 == main([*arguments, *sources[:-2]])
        assert "0/99 blocks" in capsys.readouterr().err
        assert 0 == main([*arguments, "--preset", "memory-constrained", "--max-model-len", "64"])
        assert "0/256 blocks" in capsys.readouterr().err


class TestModelDirectory:
    @pytest.mark.parametrize(
        ("name", "content", "words"),
        [
            ("config.json", '"model_type": "granite"', "model_type 'granite' does not fit"),
            ("generation_config.json", '"top_p": 0.0', r"top_p must be in \(0, 1\], got 0.0"),
            ("generation_config.json", '"top_k": "all"', "top_k must be an integer, got 'all'"),
            ("tokenizer.json", '"decoder": {"type": "CTC"}', "decoder|tokenizer.json is invalid"),
        ],
    )
    def test_what_a_service_refuses_an_engine_refuses(
        self, model_dir, tmp_path, name, content, words
    ):
        """
        A directory that no executor or scheduler would take is a ConfigError that names what is wrong.
        """
        broken = shutil.copytree(model_dir, tmp_path / "model")
        described = json.loads((broken / name).read_text())
        (broken / name).write_text(json.dumps(described | json.loads(f"{{{content}}}")))
        with pytest.raises(ConfigError, match=words) as caught:
            build(broken)
        assert "INVALID_MODEL" == caught.value.reason


class TestBundledModel:
    def test_limits_alone_make_an_engine(self):
        """
        An engine of given limits and nothing else serves the bundled model within them.
        """
        engine = InferenceEngine(EngineConfig(max_num_blocks=64, max_model_len=256))
        params = GenerationParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        completed = engine.complete("def read_json(path):", params)
        assert 8 == completed.generated_tokens
        assert completed.output_text


class TestHelp:
    @pytest.mark.parametrize(
        "line",
        [
            "--top-k INT [default: the model's, else 0]",
            "--seed INT [default: drawn]",
            "--device cpu|cuda|cuda:N|auto [default: cpu]",
            "--block-size INT [default: 16]",
            "--memory-threshold FLOAT [default: 0.9]",
        ],
    )
    def test_flag_has_its_kind_and_its_default(self, capsys, line):
        """
        --help says of each flag what it takes and what holds without it.
        """
        with pytest.raises(SystemExit):
            main(["--help"])
        assert line in " ".join(capsys.readouterr().out.split())
