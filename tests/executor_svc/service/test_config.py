"""Settings: which source wins, and what each mistake says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from executor_svc.config import load_settings
from tandem.errors import InvalidConfig

MODEL = ["--model", "some/dir"]


def complaint(argv, environ=None):
    with pytest.raises(InvalidConfig) as refused:
        load_settings(argv, environ or {})
    return refused.value.message


@pytest.fixture
def config_file(tmp_path):
    def write(content):
        path = tmp_path / "config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


class TestSources:
    def test_defaults_are_those_of_the_documentation(self):
        """
        Without settings the engine limits are the documented ones, and the name is the directory's.
        """
        loaded = load_settings(MODEL, {})
        assert (16, 1024, 32, 2048, 4096) == (
            loaded.limits.block_size,
            loaded.limits.max_num_blocks,
            loaded.limits.max_batch_size,
            loaded.limits.max_model_len,
            loaded.limits.max_total_tokens,
        )
        assert "127.0.0.1:50061" == loaded.settings.listen
        assert "dir" == loaded.model_name
        assert ["model"] == list(loaded.sources)

    def test_flag_beats_environment_beats_file_beats_default(self, config_file):
        """
        Each setting comes from the strongest source that has it.
        """
        path = config_file({"block_size": 4, "max_num_blocks": 5, "max_batch_size": 6})
        environ = {"TANDEM_EXECUTOR_BLOCK_SIZE": "8", "TANDEM_EXECUTOR_MAX_NUM_BLOCKS": "9"}
        loaded = load_settings([*MODEL, "--config", path, "--block-size", "32"], environ)
        limits = loaded.limits
        assert (32, 9, 6, 2048) == (
            limits.block_size,
            limits.max_num_blocks,
            limits.max_batch_size,
            limits.max_model_len,
        )
        assert {
            "model": "--model",
            "block_size": "--block-size",
            "max_num_blocks": "TANDEM_EXECUTOR_MAX_NUM_BLOCKS",
            "max_batch_size": path,
        } == loaded.sources

    def test_environment_can_say_everything(self, config_file):
        """
        Model, file and booleans can come from the environment alone.
        """
        environ = {
            "TANDEM_EXECUTOR_MODEL": "other/model",
            "TANDEM_EXECUTOR_CONFIG": config_file({"max_num_seqs": 3, "memory_threshold": 0.5}),
            "TANDEM_EXECUTOR_COLLECT_MARGINS": "true",
            "TANDEM_EXECUTOR_NUM_THREADS": "2",
        }
        loaded = load_settings([], environ)
        assert Path("other/model") == loaded.settings.model
        assert loaded.settings.collect_margins
        assert 2 == loaded.settings.num_threads
        assert (3, 0.5) == (loaded.limits.max_num_seqs, loaded.limits.memory_threshold)

    def test_alias_and_switch_are_flags(self):
        """
        max_num_batched_tokens is another name of max_total_tokens; --collect-margins takes no value.
        """
        loaded = load_settings([*MODEL, "--max-num-batched-tokens=99", "--collect-margins"], {})
        assert 99 == loaded.limits.max_total_tokens
        assert loaded.settings.collect_margins

    def test_variables_kubernetes_injects_are_ignored(self):
        """
        A Service named tandem-executor next to the pod does not break its start.
        """
        environ = {
            "TANDEM_EXECUTOR_SERVICE_HOST": "10.0.0.1",
            "TANDEM_EXECUTOR_SERVICE_PORT_GRPC": "50061",
            "TANDEM_EXECUTOR_PORT": "tcp://10.0.0.1:50061",
            "TANDEM_EXECUTOR_PORT_50061_TCP_ADDR": "10.0.0.1",
            "TANDEM_MAX_NUM_SEQS": "7",
        }
        assert 256 == load_settings(MODEL, environ).limits.max_num_seqs


class TestMistakes:
    @pytest.mark.parametrize(
        ("flags", "text"),
        [
            (["--block-size=0"], "block_size must be greater than 0"),
            (["--max-num-blocks=0"], "max_num_blocks must be greater than 0"),
            (["--max-batch-size=-1"], "max_batch_size must be greater than 0"),
            (["--max-model-len=15"], "max_model_len must be at least block_size"),
            (["--max-total-tokens=31"], "max_total_tokens must be at least max_batch_size"),
            (["--block-size=0", "--max-num-blocks=0"], "block_size must be greater than 0"),
        ],
        ids=str,
    )
    def test_limits_have_their_documented_texts(self, flags, text):
        """
        The shared rules answer word for word, the first one first.
        """
        assert text == complaint([*MODEL, *flags])

    def test_model_is_required(self):
        """
        Without a model the line says how to name one.
        """
        assert "no model: give --model DIR or set TANDEM_EXECUTOR_MODEL" == complaint([])

    @pytest.mark.parametrize(
        ("argv", "environ", "start"),
        [
            (["--block-size=many"], {}, "--block-size: "),
            (["--listen=nowhere"], {}, "--listen: must be HOST:PORT or unix:PATH, got 'nowhere'"),
            (["--listen=host:99999"], {}, "--listen: must be HOST:PORT"),
            (["--dtype=int8"], {}, "--dtype: input should be 'auto', 'float32', 'bfloat16'"),
            (["--blok-size=3"], {}, "unrecognized arguments: --blok-size=3; see --help"),
            ([], {"TANDEM_EXECUTOR_NUM_THREADS": "0"}, "TANDEM_EXECUTOR_NUM_THREADS: "),
            (
                [],
                {"TANDEM_EXECUTOR_BLOK_SIZE": "3"},
                "environment variable TANDEM_EXECUTOR_BLOK_SIZE is unknown; did you mean TANDEM_EXECUTOR_BLOCK_SIZE?",
            ),
        ],
        ids=str,
    )
    def test_bad_value_names_where_it_was_set(self, argv, environ, start):
        """
        The message begins with the flag or variable and says what is allowed.
        """
        assert complaint([*MODEL, *argv], environ).startswith(start)

    def test_file_must_exist_and_hold_known_keys(self, config_file, tmp_path):
        """
        An unreadable file, bad JSON and an unknown key are each named.
        """
        missing = tmp_path / "none.json"
        assert f"cannot read {missing}: No such file or directory" == complaint(
            [*MODEL, "--config", str(missing)]
        )
        assert "is not valid JSON" in complaint([*MODEL, "--config", config_file("{")])
        assert "unknown key 'blocksize'" in complaint(
            [*MODEL, "--config", config_file({"blocksize": 3})]
        )
