"""Settings: the source that wins, and the message of each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from executor_svc.config.settings import PROGRAM, load_settings
from scheduler_svc.config.settings import load_settings as load_scheduler_settings
from tandem.engine_config import PRESETS
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
            "model": "flag",
            "block_size": "flag",
            "max_num_blocks": "environment",
            "max_batch_size": "file",
        } == loaded.sources
        assert {
            "model": "--model",
            "block_size": "--block-size",
            "max_num_blocks": "environment variable TANDEM_EXECUTOR_MAX_NUM_BLOCKS",
            "max_batch_size": f"{path}: max_batch_size",
        } == loaded.places

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

    @pytest.mark.parametrize("name", ["config.json", "config.toml"])
    def test_file_can_say_everything(self, name, tmp_path):
        """
        Any setting can come from a JSON or a TOML file, under its alias too.
        """
        values = {
            "model": "other/model",
            "dtype": "bfloat16",
            "num_threads": 2,
            "collect_margins": True,
            "max_num_batched_tokens": 77,
        }
        path = tmp_path / name
        lines = [f"{key} = {json.dumps(value)}\n" for key, value in values.items()]
        path.write_text(json.dumps(values) if path.suffix == ".json" else "".join(lines))
        loaded = load_settings(["--config", str(path)], {})
        settings = loaded.settings
        assert Path("other/model") == settings.model
        assert ("bfloat16", 2, True) == (
            settings.dtype,
            settings.num_threads,
            settings.collect_margins,
        )
        assert 77 == settings.max_total_tokens
        assert {"file"} == set(loaded.sources.values())

    @pytest.mark.parametrize("preset", list(PRESETS))
    def test_file_of_the_engine_limits_serves_both_services(self, preset, config_file):
        """
        All seven limits are keys of a file, the scheduler's two among them.
        """
        path = config_file(PRESETS[preset].as_dict())
        scheduler = load_scheduler_settings(["--config", path], {})
        assert PRESETS[preset] == load_settings([*MODEL, "--config", path], {}).limits
        assert PRESETS[preset] == scheduler.settings.engine_config()

    @pytest.mark.parametrize("name", PROGRAM.foreign_keys)
    def test_options_of_the_scheduler_are_left_to_it(self, name, config_file):
        """
        A key of the file that only the scheduler has is ignored by the executor, whatever its value.
        """
        path = config_file({name: ["of", "the", "scheduler's"], "num_threads": 2})
        loaded = load_settings([*MODEL, "--config", path], {})
        assert {"num_threads": "file", "model": "flag"} == loaded.sources

    @pytest.mark.parametrize("name", ["frontends", "lost_after_s"])
    def test_other_sources_than_a_file_are_the_executors_alone(self, name):
        """
        An option of the scheduler is no flag and no variable of the executor.
        """
        variable = f"TANDEM_EXECUTOR_{name.upper()}"
        assert f"{variable}: unknown key {name!r}" in complaint(MODEL, {variable: "2"})
        flag = f"--{name.replace('_', '-')}=2"
        assert f"unrecognized arguments: {flag}" in complaint([*MODEL, flag])

    def test_limits_of_the_scheduler_are_not_shown(self, config_file):
        """
        A setting that the executor does not obey is not shown, even if a file has it.
        """
        path = config_file({"max_num_seqs": 3})
        shown = load_settings([*MODEL, "--config", path], {}).shown()
        names = [setting["name"] for setting in shown]
        assert {"name": "block_size", "value": 16, "source": "default"} in shown
        assert {"name": "model", "value": "some/dir", "source": "flag"} in shown
        assert not {"max_num_seqs", "memory_threshold"} & set(names)

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
            "TANDEM_EXECUTOR_PORT_50061_TCP": "tcp://10.0.0.1:50061",
            "TANDEM_EXECUTOR_TWO_PORT": "tcp://10.0.0.1:50061",
            "TANDEM_EXECUTOR_TWO_SERVICE_HOST": "10.0.0.1",
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
            (
                ["--batch-invariant=yes"],
                {},
                "argument --batch-invariant: takes no value, got 'yes'; see --help",
            ),
            (
                ["--num-threads=4000"],
                {},
                "--num-threads: input should be less than or equal to 1024",
            ),
            (["--pp-size=65"], {}, "--pp-size: input should be less than or equal to 64, got '65'"),
            (["--dtype=int8"], {}, "--dtype: input should be 'auto', 'float32', 'bfloat16'"),
            (
                ["--blok-size=3"],
                {},
                "unrecognized arguments: --blok-size=3; did you mean --block-size?",
            ),
            (
                [],
                {"TANDEM_EXECUTOR_NUM_THREADS": "0"},
                "environment variable TANDEM_EXECUTOR_NUM_THREADS: input should be greater than",
            ),
            (
                [],
                {"TANDEM_EXECUTOR_BLOK_SIZE": "3"},
                "environment variable TANDEM_EXECUTOR_BLOK_SIZE: unknown key 'blok_size'; did you mean 'block_size'?",
            ),
            (["--max-num-seqs=3"], {}, "unrecognized arguments: --max-num-seqs=3; see --help"),
            (
                [],
                {"TANDEM_EXECUTOR_MAX_NUM_SEQS": "3"},
                "environment variable TANDEM_EXECUTOR_MAX_NUM_SEQS: unknown key 'max_num_seqs'",
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
        for wrong, meant in (("blocksize", "block_size"), ("frontend", "frontends")):
            path = config_file({wrong: 3})
            assert f"{path}: {wrong}: unknown key {wrong!r}; did you mean {meant!r}?" == (
                complaint([*MODEL, "--config", path])
            )

    @pytest.mark.parametrize(
        ("content", "text"),
        [
            ([1], "must hold one JSON object of settings"),
            ({"num_threads": "2"}, "num_threads: input should be a valid integer, got '2'"),
            ({"collect_margins": 1}, "collect_margins: input should be a valid boolean, got 1"),
            ({"max_num_seqs": "3"}, "max_num_seqs: input should be a valid integer, got '3'"),
            ({"memory_threshold": 2}, "memory_threshold must be between 0.0 and 1.0"),
            (
                {"max_total_tokens": 64, "max_num_batched_tokens": 64},
                "max_total_tokens set the same: keep one of them",
            ),
        ],
        ids=str,
    )
    def test_file_is_read_strictly(self, content, text, config_file):
        """
        Values in a file have their type, say each thing once and obey the shared rules.
        """
        assert complaint([*MODEL, "--config", config_file(content)]).endswith(text)


class TestHelp:
    def test_help_names_every_flag_with_what_it_takes(self, capsys):
        """
        --help lists the executor's settings with their kind of value, and no other service's.
        """
        with pytest.raises(SystemExit) as ended:
            load_settings(["--help"], {})
        assert 0 == ended.value.code
        text = capsys.readouterr().out
        for flag in (
            "--model DIR",
            "--listen HOST:PORT",
            "--num-threads INT",
            "--ready-file FILE",
            "--model-name NAME",
            "--log-format {json,console}",
            "--max-num-batched-tokens INT",
            "--config FILE",
        ):
            assert flag in text
        assert "[--collect-margins]" in text
        assert "--max-num-seqs" not in text
