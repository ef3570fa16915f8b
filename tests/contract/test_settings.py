"""Presets, the KV knobs and the seven texts in the settings of both services, from every source."""

from __future__ import annotations

import itertools
import json

import pytest

from executor_svc.config import settings as executor
from scheduler_svc.config import settings as scheduler
from tandem.engine_config import PRESETS
from tandem.errors import InvalidConfig
from tandem.settings.presets import PRESET_SETTINGS
from tandem.settings.schema import KV_SIZE_KNOBS, LIMITS

SERVICES = {
    "scheduler": (scheduler.load_settings, "TANDEM_", ()),
    "executor": (executor.load_settings, "TANDEM_EXECUTOR_", ("--model", "some/dir")),
}
SOURCES = ("flag", "environment", "file")

# In the order of the documentation: values that break exactly this rule, and its text.
RULES = (
    ({"block_size": 0}, "block_size must be greater than 0"),
    ({"max_num_blocks": 0}, "max_num_blocks must be greater than 0"),
    ({"max_batch_size": 0}, "max_batch_size must be greater than 0"),
    ({"max_num_seqs": 0}, "max_num_seqs must be greater than 0"),
    ({"max_model_len": -1}, "max_model_len must be at least block_size"),
    ({"max_total_tokens": -1}, "max_total_tokens must be at least max_batch_size"),
    ({"memory_threshold": 1.1}, "memory_threshold must be between 0.0 and 1.0"),
)
SCHEDULERS_OWN = ("max_num_seqs", "memory_threshold")
"""Limits that the executor takes from a file alone."""

KNOBS = {
    "max_num_blocks": 300,
    "buffer_size_gb": 2.5,
    "mem_fraction_static": 0.8,
    "gpu_memory_utilization": 0.9,
}


@pytest.fixture(params=SERVICES)
def service(request):
    return request.param


@pytest.fixture
def load(service, tmp_path):
    """Return a function that loads a service's settings from what each source is given."""

    def load(*, flag=None, environment=None, file=None):
        read, prefix, needed = SERVICES[service]
        path = tmp_path / "config.json"
        path.write_text(json.dumps(file or {}))
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in (flag or {}).items()]
        environ = {f"{prefix}{name.upper()}": str(v) for name, v in (environment or {}).items()}
        return read([*needed, "--config", str(path), *flags], environ)

    return load


def complaint(load, **given) -> str:
    with pytest.raises(InvalidConfig) as caught:
        load(**given)
    return caught.value.message


class TestSevenTexts:
    @pytest.mark.parametrize("source", SOURCES)
    @pytest.mark.parametrize("rule", range(7), ids=LIMITS)
    def test_one_broken_rule_has_its_exact_text(self, load, service, source, rule):
        """
        A broken rule is reported with its exact text, whichever source broke it.
        """
        broken, text = RULES[rule]
        if service == "executor" and LIMITS[rule] in SCHEDULERS_OWN and source != "file":
            assert complaint(load, **{source: broken}) != text
            return
        assert text == complaint(load, **{source: broken})

    @pytest.mark.parametrize("sources", [("file", "file"), ("file", "flag"), ("flag", "file")])
    @pytest.mark.parametrize(
        ("first", "second"),
        list(itertools.combinations(range(7), 2)),
        ids=lambda index: LIMITS[index],
    )
    def test_first_of_two_broken_rules_is_reported(self, load, service, sources, first, second):
        """
        The first broken rule in the order of the documentation is reported, whichever sources broke
        them.
        """
        given: dict[str, dict[str, object]] = {"file": {}, "flag": {}}
        for source, rule in zip(sources, (first, second), strict=True):
            is_flag = service == "scheduler" or LIMITS[rule] not in SCHEDULERS_OWN
            given[source if is_flag else "file"] |= RULES[rule][0]
        assert RULES[first][1] == complaint(load, **given)


class TestPresets:
    @pytest.mark.parametrize("source", SOURCES)
    @pytest.mark.parametrize("name", PRESETS)
    def test_preset_sets_all_seven_limits(self, load, source, name):
        """
        A preset named in any source gives its documented limits.
        """
        loaded = load(**{source: {"preset": name}})
        assert PRESETS[name] == loaded.settings.engine_config()
        assert {source, "preset"} <= set(loaded.sources.values())
        assert all(loaded.sources[limit] == "preset" for limit in LIMITS)
        assert not any(loaded.is_set(limit) for limit in LIMITS)

    @pytest.mark.parametrize("source", SOURCES)
    def test_everything_set_wins_over_a_preset(self, load, source):
        """
        A value from any source replaces the preset's, even if the preset comes from a stronger source.
        """
        loaded = load(
            **{"flag": {"preset": "long-context"}, source: {"block_size": 64}}
            | ({"flag": {"preset": "long-context", "block_size": 64}} if source == "flag" else {})
        )
        assert (64, 2048) == (loaded.settings.block_size, loaded.settings.max_num_blocks)
        assert loaded.is_set("block_size")

    def test_stronger_source_names_the_preset(self, load):
        """
        A preset in a flag replaces one in the file as a whole.
        """
        loaded = load(file={"preset": "long-context"}, flag={"preset": "low-latency"})
        assert PRESETS["low-latency"] == loaded.settings.engine_config()

    def test_unknown_preset_is_refused_with_the_known_ones(self, load):
        """
        A preset that does not exist is refused with a list of the known ones.
        """
        text = complaint(load, flag={"preset": "fast"})
        assert text.startswith("--preset: input should be 'low-latency', 'high-throughput'")

    def test_broken_mixture_names_the_rule(self, load):
        """
        A value that does not go with a preset's others is refused by the shared rules.
        """
        given = {"preset": "low-latency", "max_batch_size": 1025}
        assert "max_total_tokens must be at least max_batch_size" == complaint(load, file=given)

    @pytest.mark.parametrize("name", PRESET_SETTINGS)
    def test_every_preset_is_valid_alone(self, load, name):
        """
        Every preset loads without anything else.
        """
        load(flag={"preset": name}).settings.engine_config().validate()


class TestKvSize:
    @pytest.mark.parametrize("knob", KNOBS)
    def test_one_knob_sizes_the_memory(self, load, knob):
        """
        A knob that is set alone sizes the KV cache.
        """
        assert knob == load(file={knob: KNOBS[knob]}).kv_size_knob

    def test_without_any_knob_memory_and_model_decide(self, load):
        """
        A configuration without knobs has no knob in force, no number of blocks and no
        max_model_len.
        """
        loaded = load()
        assert loaded.kv_size_knob is None
        assert (None, None) == (loaded.settings.max_num_blocks, loaded.settings.max_model_len)

    def test_block_larger_than_the_documented_length_is_no_mistake(self, load):
        """
        A max_model_len that was not set breaks no rule, whatever the block size.
        """
        assert 4096 == load(file={"block_size": 4096}).settings.engine_config().max_model_len

    @pytest.mark.parametrize(
        ("one", "other"), list(itertools.combinations(KV_SIZE_KNOBS, 2)), ids=str
    )
    def test_two_knobs_are_refused_with_both_places(self, load, one, other, tmp_path):
        """
        Two knobs, in one source or in two, are refused with the names of both and where each was
        set.
        """
        path = tmp_path / "config.json"
        assert (
            f"the KV memory is sized more than once, by {one} ({path}: {one}) and by "
            f"{other} ({path}: {other}): keep one of them"
        ) == complaint(load, file={one: KNOBS[one], other: KNOBS[other]})

    def test_two_knobs_in_two_sources_are_refused(self, load, service, tmp_path):
        """
        A flag does not silently replace another knob of the file.
        """
        text = complaint(load, flag={"max_num_blocks": 7}, file={"gpu_memory_utilization": 0.9})
        assert (
            f"by max_num_blocks (--max-num-blocks) and by gpu_memory_utilization ({tmp_path}"
            in text
        )

    def test_knob_replaces_a_presets_size(self, load):
        """
        A knob that was set replaces the preset's size, whichever knob the preset uses.
        """
        loaded = load(file={"preset": "long-context", "buffer_size_gb": 2})
        assert ("buffer_size_gb", None) == (loaded.kv_size_knob, loaded.settings.max_num_blocks)
        loaded = load(file={"preset": "deploy-throughput", "max_num_blocks": 7})
        assert ("max_num_blocks", 7) == (loaded.kv_size_knob, loaded.settings.max_num_blocks)
        assert loaded.settings.gpu_memory_utilization is None

    def test_presets_size_is_in_force_alone(self, load):
        """
        A preset's knob sizes the KV cache if no other knob is set.
        """
        assert "max_num_blocks" == load(file={"preset": "long-context"}).kv_size_knob
        loaded = load(file={"preset": "deploy-tight-memory"})
        assert "gpu_memory_utilization" == loaded.kv_size_knob
        assert 0.8 == loaded.settings.gpu_memory_utilization

    @pytest.mark.parametrize(
        ("knob", "bad"),
        [
            ("buffer_size_gb", 0),
            ("buffer_size_gb", -1),
            ("mem_fraction_static", 0),
            ("mem_fraction_static", 1),
            ("gpu_memory_utilization", 0),
            ("gpu_memory_utilization", 1.01),
            ("swap_space_gb", -0.5),
            ("swap_space_gb", 1e300),
            ("buffer_size_gb", 1e300),
        ],
    )
    def test_value_out_of_range_is_refused(self, load, knob, bad):
        """
        Sizes are over 0 and at most a PiB; shares are over 0 and under 1, the utilization at most 1.
        """
        assert f"{knob}: input should be" in complaint(load, file={knob: bad})
