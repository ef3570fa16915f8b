"""
Settings of the core's scheduling: names, spellings of other systems, ranges and error sentences.
"""

import dataclasses
import json

import pytest

from scheduler_svc.config.scheduling import SchedulingSettings, without_effect
from scheduler_svc.config.settings import SchedulerSettings, load_settings
from scheduler_svc.core.request.options import (
    CoreOptions,
    Eviction,
    OnPressure,
    Overlength,
    PreemptionMode,
    Routing,
    SchedulePolicy,
    StepPriority,
    VictimRule,
)
from tandem.errors import InvalidConfig

SET = {
    "schedule_policy": ("lof", "schedule_policy", SchedulePolicy.LOF),
    "schedule_conservativeness": ("0.3", "schedule_conservativeness", 0.3),
    "ageing_s": ("2.5", "ageing_s", 2.5),
    "priority_preemption": ("true", "priority_preemption", True),
    "routing": ("round_robin", "routing", Routing.ROUND_ROBIN),
    "prefix_caching_routing_alpha": ("0.25", "prefix_caching_routing_alpha", 0.25),
    "enable_prefix_caching": ("false", "prefix_caching", False),
    "prefix_caching_eviction_policy": ("ref_zero", "eviction", Eviction.REF_ZERO),
    "on_pressure": ("refuse", "on_pressure", OnPressure.REFUSE),
    "overlength_policy": ("truncate", "overlength", Overlength.TRUNCATE),
    "max_queued_requests": ("7", "max_queued_requests", 7),
    "max_queued_tokens": ("700", "max_queued_tokens", 700),
    "max_tenant_requests": ("3", "max_tenant_requests", 3),
    "max_tenant_queued_tokens": ("90", "max_tenant_queued_tokens", 90),
    "tenant_tokens_per_minute": ("6000", "tenant_tokens_per_minute", 6000),
    "victim_rule": ("last_admitted", "victim_rule", VictimRule.LAST_ADMITTED),
    "paused_budget_blocks": ("8", "paused_budget_blocks", 8),
    "preemption_mode": ("swap", "preemption_mode", PreemptionMode.SWAP),
    "step_priority": ("prefill-first", "step_priority", StepPriority.PREFILL_FIRST),
    "enable_chunked_prefill": ("false", "chunked_prefill", False),
    "chunked_prefill_size": ("2048", "chunked_prefill_size", 2048),
    "long_prefill_threshold": ("512", "long_prefill_threshold", 512),
    "max_prefill_share": ("0.5", "max_prefill_share", 0.5),
    "materialize_only_last_token_logits": ("true", "materialize_only_last_token_logits", True),
    "window": ("3", "window", 3),
    "run_ahead": ("8", "run_ahead", 8),
    "track_request_events": ("true", "track_request_events", True),
    "track_generated_token_events": ("true", "track_token_events", True),
    "track_paused_request_events": ("true", "track_paused_events", True),
}
"""Text of each setting, and the option that it becomes."""


def options(*argv: str, **environ: str) -> CoreOptions:
    return load_settings(argv, environ).settings.core_options()


class TestSchedulingSettings:
    def test_every_option_is_a_setting(self):
        """
        Each field of CoreOptions is set by one setting, and there are no other settings.
        """
        assert {*SET, "paused_buffer_size_gb"} == set(SchedulingSettings.model_fields)
        fields = {field.name for field in dataclasses.fields(CoreOptions)}
        assert fields == {option for _, option, _ in SET.values()}

    def test_defaults_are_those_of_the_options(self):
        """
        The core runs with the defaults of CoreOptions if nothing is set.
        """
        assert CoreOptions() == SchedulerSettings().core_options()

    @pytest.mark.parametrize("name", SET)
    def test_setting_reaches_the_core(self, name, tmp_path):
        """
        A flag, a variable and a file key set the same option.
        """
        text, option, value = SET[name]
        flag = "--" + name.replace("_", "-")
        if value is True:
            by_flag = options(flag)
        elif value is False:
            by_flag = options(f"--no-{flag[2:]}")
        else:
            by_flag = options(flag, text)
        by_variable = options(**{f"TANDEM_{name.upper()}": text})
        file = tmp_path / "scheduler.json"
        raw = value if isinstance(value, bool | int | float) else text
        file.write_text(json.dumps({name: raw}))
        by_file = options("--config", str(file))
        expected = dataclasses.replace(CoreOptions(), **{option: value})
        assert [expected] * 3 == [by_flag, by_variable, by_file]

    @pytest.mark.parametrize(
        ("argv", "option", "value"),
        [
            (("--prefix-caching-eviction-policy=ref_zero",), "eviction", Eviction.REF_ZERO),
            (("--eviction=ref_zero",), "eviction", Eviction.REF_ZERO),
            (
                ("--prefix-caching-coordinator-policy=longest_prefix",),
                "routing",
                Routing.LONGEST_PREFIX,
            ),
            (("--no-prefix-caching",), "prefix_caching", False),
            (("--overlength=truncate",), "overlength", Overlength.TRUNCATE),
            (("--long-prefill-token-threshold=9",), "long_prefill_threshold", 9),
            (("--chunked-prefill-size=-1",), "chunked_prefill_size", None),
            (("--chunked-prefill-size=0",), "chunked_prefill_size", None),
            (("--long-prefill-threshold=0",), "long_prefill_threshold", None),
            (("--max-queued-requests=",), "max_queued_requests", None),
        ],
    )
    def test_other_spellings_and_off_values(self, argv, option, value):
        """
        Names and off values of other systems are accepted.
        """
        assert value == getattr(options(*argv), option)

    @pytest.mark.parametrize(("gigabytes", "num_blocks"), [("1", 512), ("0.003", 1), ("0", 0)])
    def test_paused_budget_can_be_memory(self, gigabytes, num_blocks):
        """
        A budget in GiB becomes whole blocks of the executor's size, once that is known.
        """
        settings = load_settings(["--paused-buffer-size-gb", gigabytes], {}).settings
        assert num_blocks == settings.core_options(2 * 2**20).paused_budget_blocks
        assert 0 == settings.core_options().paused_budget_blocks

    def test_paused_budget_is_said_once(self):
        """
        A budget in blocks and one in memory at the same time are refused.
        """
        with pytest.raises(InvalidConfig, match="set the same: keep one of them"):
            options("--paused-buffer-size-gb=1", "--paused-budget-blocks=4")

    @pytest.mark.parametrize("alias", ["max_running_requests", "max_requests"])
    def test_other_names_of_the_batch_limit(self, alias):
        """
        The names of other systems for the most sequences in a step set max_batch_size.
        """
        settings = load_settings(["--" + alias.replace("_", "-"), "9"], {}).settings
        assert 9 == settings.max_batch_size

    @pytest.mark.parametrize(
        ("argv", "field", "sentence"),
        [
            (
                ("--schedule-policy=x",),
                "schedule_policy",
                (
                    "Unknown schedule_policy: policy='x'; choose one of fcfs, lpm, dfs-weight, lof, "
                    "random (--schedule-policy)"
                ),
            ),
            (
                ("--schedule-conservativeness=-1",),
                "schedule_conservativeness",
                (
                    "Invalid schedule_conservativeness: -1.0 is not 0 or more "
                    "(--schedule-conservativeness)"
                ),
            ),
            (
                ("--eviction=fifo",),
                "prefix_caching_eviction_policy",
                "prefix_caching_eviction_policy is 'fifo': choose one of lru, ref_zero (--eviction)",
            ),
            (
                ("--chunked-prefill-size=-5",),
                "chunked_prefill_size",
                (
                    "chunked_prefill_size is -5: it must be at least 1, or 0 or -1 for no limit "
                    "(--chunked-prefill-size)"
                ),
            ),
            (
                ("--max-tenant-requests=0",),
                "max_tenant_requests",
                "max_tenant_requests is 0: it must be at least 1 (--max-tenant-requests)",
            ),
            (
                ("--ageing-s=1e-308",),
                "ageing_s",
                "ageing_s is 1e-308: it must be finite and at least 0.001 (--ageing-s)",
            ),
            (
                ("--max-prefill-share=1.5",),
                "max_prefill_share",
                "max_prefill_share is 1.5: it must be over 0, at most 1 (--max-prefill-share)",
            ),
        ],
    )
    def test_senseless_value_is_refused(self, argv, field, sentence):
        """
        A setting with an impossible value is named, with where it was set and what to do.
        """
        with pytest.raises(InvalidConfig) as caught:
            load_settings(argv, {})
        assert (field, sentence) == (caught.value.field, caught.value.message)


class TestWithoutEffect:
    @pytest.mark.parametrize(
        ("argv", "num_host_blocks", "said"),
        [
            (("--preemption-mode=swap",), 0, "the executor has no host blocks"),
            ((), 7, "keeps 7 host blocks and preemption_mode is recompute"),
            (("--victim-rule=paused_budget",), 0, "none is paused: set paused_budget_blocks"),
            (("--paused-budget-blocks=3",), 0, "3 and victim_rule is fewest_generated"),
            (("--memory-threshold=0",), 0, "every request is refused"),
        ],
    )
    def test_what_does_nothing_is_told(self, argv, num_host_blocks, said):
        """
        A setting that has no effect because of another one gives one line that names the reason.
        """
        settings = load_settings(argv, {}).settings
        found = without_effect(settings.core_options(), settings.engine_config(), num_host_blocks)
        assert [said in line for line in found] == [True]

    @pytest.mark.parametrize(
        ("argv", "num_host_blocks"),
        [
            ((), 0),
            (("--preemption-mode=swap",), 7),
            (("--victim-rule=paused_budget", "--paused-budget-blocks=3"), 0),
        ],
    )
    def test_what_works_is_not_told(self, argv, num_host_blocks):
        """
        Defaults, and settings that have what they need, give no line.
        """
        settings = load_settings(argv, {}).settings
        assert [] == without_effect(
            settings.core_options(), settings.engine_config(), num_host_blocks
        )
