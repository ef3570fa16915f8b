"""Flags that `tandem up` passes on to each service, measured by the services' own settings."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from executor_svc.config.settings import ExecutorSettings
from executor_svc.model.families import FAMILIES
from scheduler_svc.config.settings import SchedulerSettings
from tandem.settings.computing import COMPUTING as COMPUTED
from tandem.settings.flags import metavar_of
from tandem.settings.scheduling import SCHEDULING as SETTINGS
from tandem.settings.scheduling import SCHEDULING_ALIASES
from tandem.settings.schema import LIMIT_ALIASES
from tandem_client.cli.app import app
from tandem_client.cli.up.service_flags import (
    COMPUTING,
    EXECUTOR,
    FLAGS,
    SCHEDULER,
    SCHEDULING,
    flags_for,
)

TAKEN = {SCHEDULER: SchedulerSettings, EXECUTOR: ExecutorSettings}


DECIDED_BY_UP = {"model", "executor", "take_over", "drain_grace_s", "dry_run", "ready_file"}
"""Settings that `tandem up` sets or has an option of its own for; and the executor's address."""


def shown(value):
    """Return a default as help shows it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value is None else str(value)


class TestTable:
    def test_every_scheduling_setting_can_be_given_to_up(self):
        """
        Each setting that says how to schedule is a flag of `tandem up`, in the same order.
        """
        assert list(SETTINGS) == [flag.name for flag in SCHEDULING]

    def test_every_setting_of_computing_can_be_given_to_up(self):
        """
        Each setting of a file on how to compute is a flag of `tandem up`, in the same order.
        """
        assert list(COMPUTED) == [flag.name for flag in COMPUTING]

    @pytest.mark.parametrize("service", [SCHEDULER, EXECUTOR])
    def test_every_setting_is_within_reach(self, service):
        """
        Every setting of a service can be given to `tandem up`, but for what it decides itself.
        """
        fields = {name for name, field in TAKEN[service].model_fields.items() if not field.exclude}
        reached = {flag.name for flag in FLAGS.values() if service in flag.services}
        ours = {*DECIDED_BY_UP, *(["listen"] if service == EXECUTOR else [])}
        assert fields - ours == reached

    @pytest.mark.parametrize("flag", FLAGS.values(), ids=lambda flag: flag.name)
    def test_help_says_what_the_services_say(self, flag):
        """
        A flag's kind of value, its choices and its default are those of each service that takes it.
        """
        for service in flag.services:
            field = TAKEN[service].model_fields[flag.name]
            assert flag.is_switch == (field.annotation is bool)
            assert flag.is_switch or metavar_of(field) == flag.kind
            assert shown(field.default) == flag.default

    def test_every_alias_of_the_services_is_one_of_up(self):
        """
        Spellings of vLLM, SGLang and Megatron Core that the services take are taken here too.
        """
        aliases = {alias: flag.name for flag in FLAGS.values() for alias in flag.aliases}
        assert {**LIMIT_ALIASES, **SCHEDULING_ALIASES} == aliases

    def test_values_become_arguments(self):
        """
        Values that were given become flags of their service; others stay away.
        """
        given = {
            "block_size": "8",
            "swap_space_gb": "1",
            "schedule_policy": "fcfs",
            "priority_preemption": True,
            "enable_prefix_caching": False,
            "ageing_s": None,
        }
        assert ["--block-size=8", "--swap-space-gb=1"] == flags_for(EXECUTOR, given)
        assert [
            "--block-size=8",
            "--schedule-policy=fcfs",
            "--priority-preemption",
            "--no-enable-prefix-caching",
        ] == flags_for(SCHEDULER, given)


class TestHelp:
    @pytest.fixture
    def text(self):
        """Return the help of `tandem up` in a narrow terminal, without line breaks."""
        return " ".join(CliRunner().invoke(app, ["up", "--help"]).stdout.split())

    @pytest.mark.parametrize("flag", FLAGS.values(), ids=lambda flag: flag.name)
    def test_each_flag_is_whole_with_type_and_default(self, text, flag):
        """
        Help shows every spelling of a flag uncut, the kind of its value and its default.
        """
        names = [f"--{name.replace('_', '-')}" for name in (flag.name, *flag.aliases)]
        start = text.index(f" {names[0]}") + 1
        entry = text[start : text.index(flag.text, start)]
        assert all(name in entry for name in names)
        assert flag.is_switch or entry.endswith(f"{flag.kind} ")
        assert not flag.default or f"{flag.text} [default: {flag.default}]" in text

    @pytest.mark.parametrize("command", ["up", "generate", "drain", "config", "--help"])
    def test_switches_show_no_type(self, command):
        """
        A switch takes no value, so help names none, not even for --help itself.
        """
        arguments = [command] if command == "--help" else [command, "--help"]
        assert "bool" not in CliRunner().invoke(app, arguments).stdout

    def test_families_that_are_computed_are_named(self, text):
        """
        Help names each model family that the executor computes, and no other.
        """
        listed = text.split("Models: ")[1].split(", in Hugging Face")[0].replace(" and ", ", ")
        assert [name.removesuffix("ForCausalLM") for name in FAMILIES] == listed.split(", ")


class TestUp:
    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["--schedule-policy=x"], "Unknown schedule_policy: policy='x'"),
            (["--schedule-conservativeness=-1"], "Invalid schedule_conservativeness"),
            (["--swap-space-gb=-1"], "--swap-space-gb: input should be greater than or equal to 0"),
            (["--num-cuda-graphs=x"], "--num-cuda-graphs: input should be a valid integer or "),
            (["--batch-invariant", "--cpu-extension=x"], "--cpu-extension: input should be 'auto'"),
        ],
    )
    def test_services_judge_before_anything_starts(self, arguments, sentence, tmp_path):
        """
        A setting that a service refuses ends the command with that service's sentence and exit 2.
        """
        result = CliRunner().invoke(app, ["up", str(tmp_path), *arguments])
        assert 2 == result.exit_code
        assert sentence in result.stderr
        assert 1 == result.stderr.count("\n")
