import json

import pytest

from scheduler_svc.config.settings import LoadedSettings, SchedulerSettings, load_settings
from scheduler_svc.core.request.geometry import ExecutorGeometry
from tandem.engine_config import PRESETS, EngineConfig
from tandem.errors import IncompatibleExecutor
from tandem.settings.schema import LIMITS

GEOMETRY = ExecutorGeometry(
    num_blocks=500,
    block_size=32,
    num_slots=64,
    max_batch_size=48,
    max_total_tokens=2048,
    max_model_len=1024,
)


def _loaded(**flags: object) -> LoadedSettings:
    return LoadedSettings(settings=SchedulerSettings(**flags), sources=dict.fromkeys(flags, "flag"))


class TestLimitsOn:
    def test_unset_limits_follow_the_executor(self):
        """A limit that is not set is the executor's, or the default if the executor has none."""
        expected = EngineConfig(
            block_size=32,
            max_num_blocks=500,
            max_batch_size=48,
            max_num_seqs=256,
            max_model_len=1024,
            max_total_tokens=2048,
            memory_threshold=0.9,
        )
        assert expected == _loaded().limits_on(GEOMETRY)

    def test_smaller_limits_apply(self):
        """A limit set below the executor's applies."""
        limits = _loaded(
            max_num_blocks=100, max_batch_size=4, max_model_len=64, max_total_tokens=16
        ).limits_on(GEOMETRY)
        assert (
            limits.max_num_blocks,
            limits.max_batch_size,
            limits.max_model_len,
            limits.max_total_tokens,
        ) == (100, 4, 64, 16)

    def test_step_limits_over_the_executors_are_narrowed(self):
        """A limit of rows or tokens per step above the executor's is narrowed to the executor's."""
        limits = _loaded(max_batch_size=99, max_total_tokens=9999).limits_on(GEOMETRY)
        assert (limits.max_batch_size, limits.max_total_tokens) == (48, 2048)

    def test_batch_never_exceeds_the_token_budget(self):
        """A token budget under the executor's batch size narrows the batch too."""
        assert _loaded(max_total_tokens=40).limits_on(GEOMETRY).max_batch_size == 40

    @pytest.mark.parametrize("name", PRESETS)
    def test_preset_narrows_and_never_contradicts(self, name):
        """
        A preset's limit is an upper bound: the executor's block size and smaller limits apply.
        """
        limits = load_settings(["--preset", name], {}).limits_on(GEOMETRY)
        preset = PRESETS[name]
        assert GEOMETRY.block_size == limits.block_size
        for limit in ("max_num_seqs", "memory_threshold"):
            assert getattr(preset, limit) == getattr(limits, limit)
        for limit, theirs in {
            "max_num_blocks": GEOMETRY.num_blocks,
            "max_batch_size": GEOMETRY.max_batch_size,
            "max_model_len": GEOMETRY.max_model_len,
            "max_total_tokens": GEOMETRY.max_total_tokens,
        }.items():
            assert min(getattr(preset, limit), theirs) == getattr(limits, limit)

    @pytest.mark.parametrize(
        ("flags", "text"),
        [
            ({"block_size": 16}, "block_size is set to 16 (flag), but the executor has 32"),
            ({"max_num_blocks": 501}, "max_num_blocks is set to 501 (flag)"),
            ({"max_model_len": 1025}, "max_model_len is set to 1025 (flag)"),
            ({"max_model_len": 20}, "max_model_len must be at least block_size"),
        ],
    )
    def test_contradiction_is_incompatible(self, flags, text):
        """A limit that was set and cannot hold on this executor is refused, naming both values."""
        with pytest.raises(IncompatibleExecutor) as caught:
            _loaded(**flags).limits_on(GEOMETRY)
        assert text in caught.value.message


class TestInForce:
    def test_every_setting_has_value_and_source(self):
        """Each setting is listed with its JSON value and its source: default, flag or executor."""
        loaded = _loaded(max_model_len=512)
        snapshot = loaded.in_force(loaded.limits_on(GEOMETRY))
        entries = {
            entry.name: (json.loads(entry.json_value), entry.source) for entry in snapshot.entries
        }
        fields = SchedulerSettings.model_fields
        assert [name for name, field in fields.items() if not field.exclude] == list(entries)
        assert entries["max_model_len"] == (512, "flag")
        assert entries["block_size"] == (32, "executor")
        assert entries["max_num_seqs"] == (256, "default")

    def test_without_executor_the_settings_stand(self):
        """The limits are shown as set before an executor is attached."""
        entries = {entry.name: entry for entry in _loaded().in_force(None).entries}
        assert {"default"} == {entries[name].source for name in LIMITS}
        assert entries["block_size"].json_value == "16"
