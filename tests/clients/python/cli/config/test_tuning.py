"""Suggested limits: the documented formula, blocks from memory, and a file that both services read."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, replace

import pytest
from typer.testing import CliRunner

from executor_svc.config.settings import load_settings as load_executor
from executor_svc.device.memory_probe import Reading
from executor_svc.memory.plan import forecast
from scheduler_svc.config.settings import load_settings as load_scheduler
from tandem.engine_config import EngineConfig
from tandem.errors import OutOfMemory
from tandem_client.cli.app import app
from tandem_client.cli.config import suggest as suggest_command
from tandem_client.cli.config.tuning import Facts, Wishes, step_tokens, suggest
from tests.model_zoo import llama_mha

MIB, GIB = 2**20, 2**30
FACTS = Facts(
    device="cuda:0 GPU",
    total_bytes=80 * GIB,
    free_bytes=79 * GIB,
    weight_bytes=14 * GIB,
    activation_bytes=2 * GIB,
    kv_bytes_per_block=8 * 2**20,
    block_size=16,
    wanted_model_len=4096,
)


def wishes(**changes) -> Wishes:
    values = {"avg_tokens": 512, "max_batch_size": 32}
    return Wishes(**{**values, **changes})


def limits(facts: Facts = FACTS, **changes) -> dict[str, float]:
    return {one.name: one.value for one in suggest(wishes(**changes), facts)}


def reason(facts: Facts, **changes) -> str:
    """Return the reason for the number of blocks."""
    (found,) = [one for one in suggest(wishes(**changes), facts) if one.name == "max_num_blocks"]
    return found.reason


def facts_of(plan) -> Facts:
    """Return the facts that the command reads from an executor's dry run."""
    return Facts(**{name: plan[name] for name in Facts.__slots__})


@dataclass
class Meter:
    """A device with so many bytes free, and as many in use."""

    free: int

    def read(self) -> Reading:
        return Reading(total=2 * self.free, free=self.free, used=self.free)


class TestFormula:
    @pytest.mark.parametrize(
        ("avg_tokens", "max_batch_size", "tokens"),
        [
            (512, 32, 24_576),
            (100, 32, 4_800),
            (85, 32, 4_080),
            (1, 1, 2),
            (3, 5, 23),
            (683, 16, 16_392),
        ],
    )
    def test_step_tokens_are_average_times_batch_times_one_and_a_half(
        self, avg_tokens, max_batch_size, tokens
    ):
        """
        max_total_tokens is average length x max_batch_size x 1.5, rounded up.
        """
        found = wishes(avg_tokens=avg_tokens, max_batch_size=max_batch_size)
        assert tokens == step_tokens(found)
        assert (
            tokens
            == limits(avg_tokens=avg_tokens, max_batch_size=max_batch_size)["max_total_tokens"]
        )

    def test_blocks_are_what_memory_leaves(self):
        """
        max_num_blocks is the used share of the memory less weights, activations and the dummy block.
        """
        assert (80 * 0.9 - 16) * 128 - 1 == limits()["max_num_blocks"]
        assert (40 * 0.5 - 16) * 128 - 1 == limits(memory_gb=40, utilization=0.5)["max_num_blocks"]

    def test_memory_taken_by_others_is_not_counted(self):
        """
        The share of the free memory is used where less is free than the share of all.
        """
        facts = Facts(
            **{**{name: getattr(FACTS, name) for name in Facts.__slots__}, "free_bytes": 50 * GIB}
        )
        assert (50 * 0.9 - 16) * 128 - 1 == limits(facts)["max_num_blocks"]

    def test_longest_request_fits_the_memory(self):
        """
        max_model_len is what the model supports, but no more than the KV memory holds.
        """
        assert 4096 == limits()["max_model_len"]
        assert 127 * 16 == limits(memory_gb=17, utilization=1)["max_model_len"]

    def test_no_more_is_suggested_than_requests_can_use(self):
        """
        On a CPU a small model gets the blocks of a full batch of longest requests, however much
        memory there is, as tandem up takes them; a share that is asked for is taken, and called so.
        """
        facts = replace(FACTS, device="cpu", kv_bytes_per_block=1024, wanted_model_len=2040)
        assert 32 * 128 == limits(facts)["max_num_blocks"]
        assert (
            "what tandem up takes by default: max_batch_size 32 requests of max_model_len 2040; "
        ) in reason(facts)
        assert (
            40 * GIB // 1024 - 1 == limits(facts, memory_gb=112, utilization=0.5)["max_num_blocks"]
        )
        assert "as asked for and not as tandem up takes" in reason(facts, utilization=0.5)

    @pytest.mark.parametrize("left", [MIB, 16 * MIB, GIB], ids=["length", "share", "batch"])
    @pytest.mark.parametrize("wanted_len", [None, 400])
    def test_kv_is_what_the_executor_takes_by_default(self, tmp_path, left, wanted_len):
        """
        With the same limits an executor that is told no KV size takes the blocks and the length
        that are suggested, whether the batch or what weights and activations leave bounds them.
        """
        found = wishes(max_model_len=wanted_len)
        flags = [f"--model={llama_mha(tmp_path)}", "--device=cpu"]
        flags += [f"--max-total-tokens={step_tokens(found)}", "--max-batch-size=32"]
        flags += [] if wanted_len is None else [f"--max-model-len={wanted_len}"]
        loaded = load_executor(flags, {})
        large = facts_of(forecast(loaded, lambda _: Meter(GIB)))
        fixed = large.weight_bytes + large.activation_bytes
        plan = forecast(loaded, lambda _: Meter(fixed + left))
        suggested = {one.name: one.value for one in suggest(found, facts_of(plan))}
        assert (plan["num_blocks"], plan["max_model_len"]) == (
            suggested["max_num_blocks"],
            suggested["max_model_len"],
        )

    def test_suggestions_are_valid_limits(self):
        """
        All seven limits are suggested, and pass the shared rules.
        """
        found = limits(avg_tokens=1, max_batch_size=1)
        EngineConfig(**found).validate()
        assert list(EngineConfig().as_dict()) == list(found)

    def test_memory_without_room_is_refused_with_the_numbers(self):
        """
        Memory that does not hold model and one block is an error that says what takes how much.
        """
        with pytest.raises(OutOfMemory) as caught:
            suggest(wishes(memory_gb=16.001, utilization=1), FACTS)
        assert (
            "the 16.00 GiB that are free do not hold the weights (14.00 GiB), activations (2.00"
            in (caught.value.message)
        )
        with pytest.raises(
            OutOfMemory, match=r"^14\.00 GiB, 0\.5 of the device, do not hold the w"
        ):
            suggest(wishes(memory_gb=28, utilization=0.5), FACTS)


class TestCommand:
    @pytest.mark.parametrize("size", ["inf", "nan", "1e300", "-1"])
    def test_memory_that_is_no_size_is_refused(self, size):
        """
        A size that no device can have is a mistake of usage, not a failure.
        """
        result = CliRunner().invoke(app, ["config", "suggest", f"--memory-gb={size}"])
        assert 2 == result.exit_code
        assert "--memory-gb" in result.stderr

    @pytest.mark.slow
    def test_file_is_read_by_both_services(self, tmp_path):
        """
        The printed file has a reason over each line, and gives both services the same limits.
        """
        arguments = ["config", "suggest", "--memory-gb=2", "--device=cpu", "--avg-tokens=100"]
        result = CliRunner().invoke(app, arguments)
        assert 0 == result.exit_code, result.output
        lines = result.stdout.splitlines()
        assert all(
            lines[index - 1].startswith("# ")
            for index, line in enumerate(lines)
            if "=" in line[:20]
        )
        assert "# average length 100 x batch 32 x 1.5" in lines
        path = tmp_path / "tandem.toml"
        path.write_text(result.stdout)
        written = tomllib.loads(result.stdout)
        assert 4800 == written["max_total_tokens"]
        for load, needed in ((load_scheduler, []), (load_executor, ["--model=any"])):
            loaded = load([*needed, "--config", str(path)], {})
            assert EngineConfig(**written) == loaded.settings.engine_config()

    def test_json_has_the_reasons(self, monkeypatch):
        """
        With --json each suggestion is an object of name, value and reason, and nothing else is printed.
        """
        monkeypatch.setattr(suggest_command, "_facts", lambda _flags: FACTS)
        result = CliRunner().invoke(app, ["config", "suggest", "--json"])
        assert 0 == result.exit_code, result.output
        assert [{"name", "value", "reason"}] * 7 == [set(one) for one in json.loads(result.stdout)]

    def test_too_little_memory_is_one_line(self, monkeypatch):
        """
        Memory that cannot work is one line with what takes how much, exit code 2.
        """
        monkeypatch.setattr(suggest_command, "_facts", lambda _flags: FACTS)
        result = CliRunner().invoke(app, ["config", "suggest", "--memory-gb=1"])
        assert 2 == result.exit_code
        assert result.output.startswith(
            "tandem: OUT_OF_MEMORY: the 1.00 GiB that are free do not hold"
        )
        assert 1 == result.output.count("\n")

    @pytest.mark.parametrize(
        ("arguments", "line"),
        [
            (["/nowhere"], "INVALID_MODEL: model directory /nowhere does not exist"),
            (
                ["--max-model-len=3", "--block-size=4"],
                "INVALID_CONFIG: max_model_len must be at least",
            ),
        ],
        ids=["model", "limit"],
    )
    def test_what_the_executor_refuses_is_one_line(self, arguments, line):
        """
        A model or limit that the executor would refuse is its own line, exit code 2.
        """
        result = CliRunner().invoke(app, ["config", "suggest", "--device=cpu", *arguments])
        assert 2 == result.exit_code
        assert result.output.startswith(f"tandem: {line}")
        assert 1 == result.output.count("\n")
