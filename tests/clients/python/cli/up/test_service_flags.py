"""Flags that `tandem up` passes on to each service, measured by the services' own settings."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from executor_svc.config.settings import ExecutorSettings
from executor_svc.model.families import FAMILIES
from scheduler_svc.config.settings import SchedulerSettings
from tandem.settings.options import Group, options_of
from tandem_client.cli.app import app
from tandem_client.cli.local_server.services import LINK_SECURITY
from tandem_client.cli.up.service_flags import EXECUTOR, FLAGS, SCHEDULER, flags_for

TAKEN = {SCHEDULER: SchedulerSettings, EXECUTOR: ExecutorSettings}


DECIDED_BY_UP = {"model", "executor", "take_over", "drain_grace_s", "dry_run", "ready_file"}
"""Settings that `tandem up` sets or has an option of its own for; and the executor's address."""


def options_within_reach(service):
    """Return the options of a service that can be given to `tandem up`."""
    ours = {*DECIDED_BY_UP, *(["listen"] if service == EXECUTOR else [])}
    ours |= {"local_listen", *LINK_SECURITY[service]}
    return [option for option in options_of(service) if option.name not in ours]


class TestTable:
    @pytest.mark.parametrize("service", [SCHEDULER, EXECUTOR])
    def test_every_setting_is_within_reach(self, service):
        """
        Every setting of a service can be given to `tandem up`, but for what it decides itself:
        among that the security of the link, which is a socket of this user alone.
        """
        fields = {name for name, field in TAKEN[service].model_fields.items() if not field.exclude}
        reached = {name for name, flag in FLAGS.items() if service in flag.services}
        link = {"local_listen", *LINK_SECURITY[service]}
        ours = {*DECIDED_BY_UP, *link, *(["listen"] if service == EXECUTOR else [])}
        assert fields - ours == reached

    @pytest.mark.parametrize("service", [SCHEDULER, EXECUTOR])
    def test_help_says_what_the_services_say(self, service):
        """
        A flag's kind of value, its choices, its default and its other names are those of each
        service that takes it.
        """
        for option in options_within_reach(service):
            shown = FLAGS[option.name].option
            assert option.metavar == shown.metavar
            assert option.default == shown.default
            assert option.aliases == shown.aliases
            assert option.group == shown.group

    def test_groups_follow_each_other(self):
        """
        Help lists the flags group by group, in the order in which the groups are declared.
        """
        groups = [flag.option.group for flag in FLAGS.values()]
        assert list(Group) == list(dict.fromkeys(groups))
        assert sorted(groups, key=list(Group).index) == groups

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
        lines = CliRunner().invoke(app, ["up", "--help"]).stdout.split()
        return " ".join(lines).replace("- ", "-")  # lines break after hyphens

    @pytest.mark.parametrize("flag", FLAGS.values(), ids=lambda flag: flag.option.name)
    def test_each_flag_is_whole_with_type_and_default(self, text, flag):
        """
        Help shows every spelling of a flag uncut, the kind of its value and its default.
        """
        option = flag.option
        names = [f"--{name.replace('_', '-')}" for name in (option.name, *option.aliases)]
        start = text.index(f" {names[0]}") + 1
        entry = text[start : text.index(flag.text, start)]
        assert all(name in entry for name in names)
        assert option.metavar is None or entry.endswith(f"{option.metavar} ")
        assert option.default is None or flag.text.endswith(f" [default: {option.default}]")

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
