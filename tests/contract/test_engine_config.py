"""The seven engine limits, their error texts, files and presets."""

from __future__ import annotations

import itertools
import json
import math

import pytest

from tandem.engine_config import PRESETS, EngineConfig
from tandem.errors import InvalidConfig

# In the order of the documentation: values that break exactly this rule, and its text.
RULES = [
    ({"block_size": 0}, "block_size must be greater than 0"),
    ({"max_num_blocks": 0}, "max_num_blocks must be greater than 0"),
    ({"max_batch_size": 0}, "max_batch_size must be greater than 0"),
    ({"max_num_seqs": 0}, "max_num_seqs must be greater than 0"),
    ({"max_model_len": -1}, "max_model_len must be at least block_size"),
    ({"max_total_tokens": -1}, "max_total_tokens must be at least max_batch_size"),
    ({"memory_threshold": 1.1}, "memory_threshold must be between 0.0 and 1.0"),
]


class TestValidate:
    @pytest.mark.parametrize(("broken", "text"), RULES, ids=[text.split()[0] for _, text in RULES])
    def test_one_broken_rule_raises_its_exact_text(self, broken, text):
        """
        A rule that is broken is reported with its exact text.
        """
        with pytest.raises(InvalidConfig) as caught:
            EngineConfig(**broken).validate()
        assert text == caught.value.message

    @pytest.mark.parametrize(
        ("first", "second"),
        list(itertools.combinations(range(7), 2)),
        ids=lambda index: RULES[index][1].split()[0],
    )
    def test_two_broken_rules_raise_the_first_in_table_order(self, first, second):
        """
        The first broken rule in the order of the documentation is reported.
        """
        with pytest.raises(InvalidConfig) as caught:
            EngineConfig(**(RULES[first][0] | RULES[second][0])).validate()
        assert RULES[first][1] == caught.value.message

    @pytest.mark.parametrize("threshold", [math.nan, math.inf, -math.inf, -0.1, 1.1])
    def test_threshold_outside_the_unit_interval_is_refused(self, threshold):
        """
        A memory_threshold that is not a number from 0 to 1 is refused.
        """
        with pytest.raises(InvalidConfig) as caught:
            EngineConfig(memory_threshold=threshold).validate()
        assert "memory_threshold must be between 0.0 and 1.0" == caught.value.message

    @pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
    def test_threshold_bounds_are_accepted(self, threshold):
        """
        Both ends of the interval are valid thresholds.
        """
        EngineConfig(memory_threshold=threshold).validate()

    def test_relations_hold_at_equality(self):
        """
        max_model_len may equal block_size and max_total_tokens may equal max_batch_size.
        """
        EngineConfig(
            block_size=64, max_model_len=64, max_batch_size=9, max_total_tokens=9
        ).validate()

    @pytest.mark.parametrize(
        "broken",
        [
            {"block_size": 64, "max_model_len": 63},
            {"max_batch_size": 9, "max_total_tokens": 8},
        ],
    )
    def test_relations_fail_one_below(self, broken):
        """
        A max_model_len below block_size and a max_total_tokens below max_batch_size are refused.
        """
        with pytest.raises(InvalidConfig):
            EngineConfig(**broken).validate()

    def test_negative_counts_are_refused(self):
        """
        Negative counts are refused like zero.
        """
        for name in ("block_size", "max_num_blocks", "max_batch_size", "max_num_seqs"):
            with pytest.raises(InvalidConfig, match=f"{name} must be greater than 0"):
                EngineConfig(**{name: -3}).validate()


class TestWarnings:
    @pytest.mark.parametrize("block_size", [256, 24, 7])
    def test_unusual_block_sizes_work_with_a_warning(self, block_size):
        """
        A block size over 128 or not a power of two is valid, with a warning that names it.
        """
        config = EngineConfig(block_size=block_size)
        config.validate()
        assert str(block_size) in config.warnings()[0]

    def test_usual_settings_warn_of_nothing(self):
        """
        The defaults, and every power of two up to 128, give no warning.
        """
        sizes = (1, 2, 4, 8, 16, 32, 64, 128)
        assert [[]] * 8 == [EngineConfig(block_size=size).warnings() for size in sizes]

    def test_batch_over_system_limit_warns_only(self):
        """
        max_batch_size above max_num_seqs is valid, with a warning that names the flags to use instead.
        """
        config = EngineConfig(max_batch_size=300)
        config.validate()
        (warning,) = config.warnings()
        assert "max_num_seqs is 256 and counts waiting requests too" in warning
        assert "--max-batch-size, or SGLang's --max-running-requests" in warning


DOCUMENTED_PRESETS = {
    "low-latency": (16, 512, 8, 64, 1024, 1024, 0.8),
    "high-throughput": (32, 4096, 128, 1024, 4096, 16384, 0.95),
    "memory-constrained": (16, 256, 16, 128, 1024, 2048, 0.85),
    "long-context": (32, 2048, 16, 64, 8192, 8192, 0.9),
}


class TestPresets:
    def test_presets_have_the_documented_values(self):
        """
        The four presets are exactly those of the documentation.
        """
        found = {name: tuple(config.as_dict().values()) for name, config in PRESETS.items()}
        assert DOCUMENTED_PRESETS == found

    def test_presets_validate_without_warning(self):
        """
        Every preset is valid and usual.
        """
        for name in PRESETS:
            config = EngineConfig.preset(name)
            config.validate()
            assert [] == config.warnings()

    def test_unknown_preset_names_the_known_ones(self):
        """
        A request for an unknown preset is refused with a list of the known ones.
        """
        with pytest.raises(InvalidConfig, match=r"'fast'.*low-latency, high-throughput"):
            EngineConfig.preset("fast")


class TestFromFile:
    def test_missing_keys_keep_their_defaults(self, tmp_path):
        """
        A file that sets one key leaves the other six at their defaults.
        """
        path = tmp_path / "config.json"
        path.write_text('{"block_size": 32}')
        assert EngineConfig(block_size=32) == EngineConfig.from_file(path)
        assert EngineConfig(block_size=32) == EngineConfig.from_file(str(path))

    def test_what_is_written_is_read_back(self, tmp_path):
        """
        A configuration survives being written as JSON and read.
        """
        path = tmp_path / "config.json"
        path.write_text(json.dumps(PRESETS["long-context"].as_dict()))
        assert PRESETS["long-context"] == EngineConfig.from_file(path)

    @pytest.mark.parametrize(
        ("content", "named"),
        [
            ('{"blocksize": 32}', "blocksize"),
            ('{"block_size": "16"}', "block_size"),
            ('{"block_size": 16.5}', "block_size"),
            ('{"block_size": true}', "block_size"),
            ("[1]", "JSON object"),
            ("{", "not valid JSON"),
        ],
        ids=["unknown", "text", "fraction", "bool", "list", "broken"],
    )
    def test_bad_content_is_refused_with_file_and_key(self, tmp_path, content, named):
        """
        A file with anything but an object of known names with numbers is refused, naming file and
        key.
        """
        path = tmp_path / "config.json"
        path.write_text(content)
        with pytest.raises(InvalidConfig) as caught:
            EngineConfig.from_file(path)
        assert str(path) in caught.value.message
        assert named in caught.value.message

    def test_missing_file_is_refused_with_its_name(self, tmp_path):
        """
        A file that cannot be read is refused, naming it.
        """
        with pytest.raises(InvalidConfig, match=r"absent\.json"):
            EngineConfig.from_file(tmp_path / "absent.json")
