import itertools
import json
from pathlib import Path

import pytest

from scheduler_svc.config.settings import PROGRAM, load_settings
from tandem.engine_config import EngineConfig
from tandem.errors import InvalidConfig
from tandem.settings.schema import LIMITS

RULES = (
    ({"block_size": 0}, "block_size must be greater than 0"),
    ({"max_num_blocks": 0}, "max_num_blocks must be greater than 0"),
    ({"max_batch_size": 0}, "max_batch_size must be greater than 0"),
    ({"max_num_seqs": 0}, "max_num_seqs must be greater than 0"),
    ({"max_model_len": 15}, "max_model_len must be at least block_size"),
    ({"max_total_tokens": 31}, "max_total_tokens must be at least max_batch_size"),
    ({"memory_threshold": 1.5}, "memory_threshold must be between 0.0 and 1.0"),
)
"""Engine rules, each with a setting that breaks it alone, in the order of the documentation."""


def _write(tmp_path: Path, content: object, name: str = "config.json") -> str:
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


class TestPrecedence:
    @pytest.mark.parametrize(
        "given",
        [given for size in range(4) for given in itertools.combinations((0, 1, 2), size)],
        ids=lambda given: "+".join(("file", "env", "flag")[i] for i in given) or "none",
    )
    def test_the_highest_source_given_wins(self, given, tmp_path):
        """Flags win over environment, environment over the file, the file over defaults."""
        file = _write(tmp_path, {"max_num_seqs": 11} if 0 in given else {})
        environ = {"TANDEM_MAX_NUM_SEQS": "12"} if 1 in given else {}
        flags = ["--max-num-seqs", "13"] if 2 in given else []
        loaded = load_settings(["--config", file, *flags], environ)
        expected = {0: (11, "file"), 1: (12, "environment"), 2: (13, "flag")}
        value, source = expected[max(given)] if given else (256, None)
        assert value == loaded.settings.max_num_seqs
        assert source == loaded.sources.get("max_num_seqs")

    def test_layers_combine_by_key(self, tmp_path):
        """A key takes its value from the highest source that sets it, whatever sets other keys."""
        file = _write(tmp_path, {"block_size": 32, "max_num_blocks": 64})
        loaded = load_settings(
            ["--config", file, "--window", "2"], {"TANDEM_MAX_NUM_BLOCKS": "128"}
        )
        settings = loaded.settings
        assert (settings.block_size, settings.max_num_blocks, settings.window) == (32, 128, 2)
        expected = {"block_size": "file", "max_num_blocks": "environment", "window": "flag"}
        assert expected == loaded.sources

    def test_defaults_are_those_of_the_engine(self):
        """The seven limits without any source are EngineConfig's defaults."""
        assert EngineConfig() == load_settings([], {}).settings.engine_config()

    def test_config_file_can_come_from_the_environment(self, tmp_path):
        """The variable TANDEM_CONFIG names the file as --config does."""
        file = _write(tmp_path, {"block_size": 8})
        assert load_settings([], {"TANDEM_CONFIG": file}).settings.block_size == 8

    def test_toml_file(self, tmp_path):
        """A file that ends in .toml is read as TOML."""
        file = _write(tmp_path, 'memory_threshold = 0.5\nlisten = "[::1]:0"\n', "config.toml")
        settings = load_settings(["--config", file], {}).settings
        assert (settings.memory_threshold, settings.listen) == (0.5, "[::1]:0")

    @pytest.mark.parametrize("source", ["file", "environment", "flag"])
    def test_alias_sets_its_setting(self, source, tmp_path):
        """The name max_num_batched_tokens sets max_total_tokens in every source."""
        file = _write(tmp_path, {"max_num_batched_tokens": 77} if source == "file" else {})
        environ = {"TANDEM_MAX_NUM_BATCHED_TOKENS": "77"} if source == "environment" else {}
        flags = ["--max-num-batched-tokens", "77"] if source == "flag" else []
        loaded = load_settings(["--config", file, *flags], environ)
        assert loaded.settings.max_total_tokens == 77
        assert {"max_total_tokens": source} == loaded.sources

    def test_empty_text_turns_an_optional_address_off(self):
        """An empty admin or metrics address means none; the public address cannot be empty."""
        loaded = load_settings(["--admin-listen", ""], {"TANDEM_METRICS_LISTEN": ""})
        assert (loaded.settings.admin_listen, loaded.settings.metrics_listen) == (None, None)
        with pytest.raises(InvalidConfig, match="--listen: must be HOST:PORT"):
            load_settings(["--listen", ""], {})


class TestEngineLimits:
    @pytest.mark.parametrize(("broken", "text"), RULES, ids=lambda value: str(value)[:24])
    def test_each_rule_has_its_text(self, broken, text, tmp_path):
        """A limit that breaks one rule is refused with exactly that rule's text."""
        with pytest.raises(InvalidConfig) as caught:
            load_settings(["--config", _write(tmp_path, broken)], {})
        assert text == caught.value.message

    @pytest.mark.parametrize("pair", list(itertools.combinations(range(len(RULES)), 2)))
    def test_the_first_broken_rule_is_named(self, pair, tmp_path):
        """The first of two broken rules in the order of the documentation is named."""
        first, second = (RULES[i] for i in pair)
        broken = {**second[0], **first[0]}
        with pytest.raises(InvalidConfig) as caught:
            load_settings(["--config", _write(tmp_path, broken)], {})
        assert first[1] == caught.value.message

    @pytest.mark.parametrize("text", ["nan", "inf", "-0.1", "1.1"])
    def test_threshold_outside_its_range_is_refused(self, text):
        """A memory_threshold that is not a number between 0 and 1 is refused, NaN too."""
        with pytest.raises(InvalidConfig, match=r"memory_threshold must be between 0\.0 and 1\.0"):
            load_settings(["--memory-threshold", text], {})

    def test_block_size_over_128_is_accepted(self):
        """An unusual block size is accepted with a warning."""
        config = load_settings(["--block-size", "256"], {}).settings.engine_config()
        assert config.block_size == 256
        assert "256 is unusual" in config.warnings()[0]


class TestMistakes:
    @pytest.mark.parametrize(
        ("argv", "environ", "content", "text"),
        [
            ([], {}, {"block_sizes": 1}, "unknown key 'block_sizes'; did you mean 'block_size'?"),
            ([], {}, {"batch_invarient": True}, "did you mean 'batch_invariant'?"),
            ([], {"TANDEM_WINDOWS": "1"}, {}, "TANDEM_WINDOWS: unknown key 'windows'"),
            (["--windw", "1"], {}, {}, "unrecognized arguments: --windw 1; did you mean --window?"),
            (["--windo", "1"], {}, {}, "unrecognized arguments: --windo 1"),
            (["--window", "two"], {}, {}, "--window: input should be a valid integer"),
            (["--window", "0"], {}, {}, "--window: input should be greater than or equal to 1"),
            ([], {}, {"window": "2"}, "window: input should be a valid integer, got '2'"),
            ([], {}, {"window": True}, "window: input should be a valid integer, got True"),
            (["--log-level", "loud"], {}, {}, "--log-level: input should be 'debug', 'info'"),
            (["--listen", "host"], {}, {}, "--listen: must be HOST:PORT or unix:PATH, got 'host'"),
            (["--listen", "h:70000"], {}, {}, "--listen: must be HOST:PORT"),
            (
                ["--max-total-tokens", "64", "--max-num-batched-tokens", "64"],
                {},
                {},
                "set the same: keep one of them",
            ),
            ([], {}, "{", "is not valid JSON"),
            ([], {}, [1], "must hold one JSON object"),
        ],
    )
    def test_mistake_is_named_with_its_place(self, argv, environ, content, text, tmp_path):
        """A mistake in any source is an error that says where it is and what is wrong."""
        file = _write(tmp_path, content)
        with pytest.raises(InvalidConfig) as caught:
            load_settings(["--config", file, *argv], environ)
        assert text in caught.value.message

    def test_missing_file_is_named(self, tmp_path):
        """A file that cannot be read is an error with its path and the cause."""
        path = tmp_path / "none.json"
        with pytest.raises(InvalidConfig) as caught:
            load_settings(["--config", str(path)], {})
        assert f"cannot read {path}: No such file or directory" == caught.value.message

    @pytest.mark.parametrize(
        "variable",
        [
            "TANDEM_EXECUTOR_MODEL",
            "TANDEM_CLIENT_ADDRESS",
            "TANDEM_CACHE_DIR",
            "TANDEM_TORCH_INDEX",
            "TANDEM_SCHEDULER_SERVICE_HOST",
            "TANDEM_SCHEDULER_SERVICE_PORT_GRPC",
            "TANDEM_SCHEDULER_PORT",
            "TANDEM_SERVICE_HOST",
            "TANDEM_PORT",
            "TANDEM_SCHEDULER_PORT_50051_TCP_ADDR",
        ],
    )
    def test_variables_of_others_are_left_alone(self, variable):
        """
        A variable of the executor, the client, the cache or Kubernetes is no setting of the
        scheduler.
        """
        assert load_settings([], {variable: "tcp://10.0.0.1:50051"}).sources == {}

    @pytest.mark.parametrize("name", PROGRAM.foreign_keys)
    def test_options_of_the_executor_are_left_to_it(self, name, tmp_path):
        """
        A key of the file that only the executor has is ignored by the scheduler, whatever its value.
        """
        file = _write(tmp_path, {name: "of the executor's own kind", "window": 3})
        assert {"window": "file"} == load_settings(["--config", file], {}).sources


class TestHelp:
    def test_help_names_every_setting_with_its_default(self, capsys):
        """The flag --help prints every flag and exits 0."""
        with pytest.raises(SystemExit) as caught:
            load_settings(["--help"], {})
        assert caught.value.code == 0
        text = capsys.readouterr().out
        assert all("--" + name.replace("_", "-") in text for name in (*LIMITS, "window", "listen"))
        assert "default: 4096" in text


class TestExecutorAddresses:
    def test_one_or_several_are_taken_in_order(self):
        """
        The executor's addresses are one, or several with commas between them in order of
        preference.
        """
        assert ("127.0.0.1:50061",) == load_settings([], {}).settings.executor_addresses
        flags = ["--executor", "a:1, b:2,unix:/run/c.sock"]
        expected = ("a:1", "b:2", "unix:/run/c.sock")
        assert expected == load_settings(flags, {}).settings.executor_addresses

    def test_names_mean_executors_that_are_looked_up(self):
        """An address that gRPC's own resolver would take is a name that may mean several."""
        settings = load_settings(["--executor", "a:1,dns:///pods:50061"], {}).settings
        assert ("a:1",) == settings.executor_addresses
        assert ("dns:///pods:50061",) == settings.executor_names
        assert () == settings.standby_addresses

    def test_executor_that_serves_cannot_stand_by(self):
        """The error names the address and the place where it is set twice."""
        flags = ["--executor", "a:1,b:2", "--standby", "c:3,b:2"]
        with pytest.raises(InvalidConfig, match="standby names b:2, which executor names too"):
            load_settings(flags, {})
        settings = load_settings(["--executor", "a:1", "--standby", "c:3,b:2"], {}).settings
        assert ("c:3", "b:2") == settings.standby_addresses

    @pytest.mark.parametrize(
        ("text", "what"),
        [
            ("a:1,b", "HOST:PORT"),
            ("a:1,,b:2", "HOST:PORT"),
            ("a:1,a:1", "must not name an address twice"),
            ("", "HOST:PORT"),
        ],
    )
    def test_wrong_lists_are_refused_by_name(self, text, what):
        """A part that is no address, or the same one twice, is refused with the flag's name."""
        with pytest.raises(InvalidConfig, match="--executor") as refused:
            load_settings(["--executor", text], {})
        assert what in refused.value.message
