"""Which flags `tandem up` passes on, and to whom; the services' own settings are the measure."""

from __future__ import annotations

from typing import get_type_hints

import pytest
from typer.testing import CliRunner

from executor_svc.config import ExecutorSettings
from scheduler_svc.config import SchedulerSettings
from tandem.settings.computing import COMPUTING as COMPUTED
from tandem.settings.scheduling import SCHEDULING as SETTINGS
from tandem_client.cli.app import app
from tandem_client.cli.service_flags import (
    COMPUTING,
    EXECUTOR,
    LIMITS,
    SCHEDULER,
    SCHEDULING,
    flags_for,
)

TAKEN = {SCHEDULER: SchedulerSettings, EXECUTOR: ExecutorSettings}


class TestTable:
    def test_every_scheduling_setting_can_be_given_to_up(self):
        """
        Each setting that says how to schedule is a flag of `tandem up`, in the same order.
        """
        assert list(SETTINGS) == [flag.name.removeprefix("no_") for flag in SCHEDULING]

    def test_every_setting_of_computing_can_be_given_to_up(self):
        """
        What one file may say of how to compute is a flag of `tandem up`, in the same order.
        """
        assert list(COMPUTED) == [flag.name.removeprefix("no_") for flag in COMPUTING]

    @pytest.mark.parametrize("flag", [*LIMITS, *SCHEDULING, *COMPUTING], ids=lambda flag: flag.name)
    def test_each_flag_is_a_setting_of_who_gets_it(self, flag):
        """
        A flag goes to the services that have it as a setting, to all of them, and switches only to
        switches: one that is off by default can be put on, the other off.
        """
        name = flag.name.removeprefix("no_")
        for service, settings in TAKEN.items():
            field = settings.model_fields.get(name)
            takes = field is not None and not field.exclude
            assert takes == (service in flag.services)
            if takes and field is not None:
                assert flag.is_switch == (get_type_hints(settings)[name] is bool)
                assert not flag.is_switch or field.default == flag.name.startswith("no_")

    def test_values_become_arguments(self):
        """
        What was given becomes flags of its service; what was not stays away.
        """
        given = {
            "block_size": "8",
            "swap_space_gb": "1",
            "schedule_policy": "fcfs",
            "priority_preemption": True,
            "no_enable_prefix_caching": False,
            "ageing_s": None,
        }
        assert ["--block-size=8", "--swap-space-gb=1"] == flags_for(EXECUTOR, given)
        assert ["--block-size=8", "--schedule-policy=fcfs", "--priority-preemption"] == flags_for(
            SCHEDULER, given
        )


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
