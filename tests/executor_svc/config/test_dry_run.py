"""`--dry-run`: the plan of the memory, without loading anything."""

from __future__ import annotations

import json

import pytest
from structlog.testing import capture_logs

from executor_svc import run as executor
from executor_svc.model import loader
from tandem.process.process_start import run_or_refuse
from tandem.settings.schema import KV_SIZE_KNOBS


@pytest.fixture
def dry_run(model_dir, capsys, monkeypatch):
    """
    Run a dry run and return its exit code, output and errors, without what it logs; loading weights
    fails the test.
    """

    def run(*flags: str) -> tuple[int, str, str]:
        with monkeypatch.context() as patch, capture_logs():
            patch.setattr(loader, "load_weights", lambda *_: pytest.fail("weights are loaded"))
            # Loggers of other tests' modules would keep writing to the stream captured here.
            patch.setattr(executor, "configure_logging", lambda *_: None)
            argv = ["--model", str(model_dir), "--device=cpu", "--dry-run", *flags]
            code = run_or_refuse(lambda: executor.run(argv))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def planned(dry_run):
    """Return the plan of a dry run that succeeds."""

    def run(*flags: str) -> dict[str, object]:
        code, output, errors = dry_run("--log-format=json", *flags)
        assert (0, "") == (code, errors)
        return json.loads(output)

    return run


class TestPlan:
    def test_plan_for_people_names_everything(self, dry_run):
        """
        A dry run prints weights, activations, KV, what they hold, and all four sizes, and ends 0.
        """
        code, output, errors = dry_run("--max-num-blocks=40", "--swap-space-gb=0.01")
        assert (0, "") == (code, errors)
        for words in (
            "memory plan for cpu: ",
            "  weights      0.000 GiB, float32",
            "  activations  ",
            "  KV memory    0.000 GiB, 40 blocks of 16 tokens and a dummy",
            "  swap space   2621 host blocks",
            "  holds        640 tokens, max_model_len is 512",
            "sized by max_num_blocks 40 (--max-num-blocks); the same size as",
            *(f"  {knob} = " for knob in KV_SIZE_KNOBS),
        ):
            assert words in output

    def test_plan_for_programs_is_what_a_start_does(self, planned, start):
        """
        With JSON logs the plan is one object with a start's blocks and bytes for the same flags.
        """
        flags = ("--buffer-size-gb=0.004", "--block-size=8", "--dtype=float32")
        plan = planned(*flags)
        about = start(*flags).describe()
        assert (plan["num_blocks"], plan["kv_bytes_per_block"]) == (
            about.num_blocks,
            about.kv_bytes_per_block,
        )
        assert (plan["max_model_len"], plan["max_batch_size"]) == (
            about.max_model_len,
            about.max_batch_size,
        )

    def test_warnings_are_part_of_the_plan(self, dry_run, planned):
        """
        A length that was asked for and the KV memory does not hold is planned with a warning.
        """
        flags = ("--max-num-blocks=3", "--max-model-len=512")
        (warning,) = planned(*flags)["warnings"]
        assert "holds 48 tokens and max_model_len is 512" in warning
        assert f"warning: {warning}\n" in dry_run(*flags)[1]

    def test_length_that_nobody_asked_for_follows_the_memory(self, planned):
        """
        Without max_model_len it is what the model supports, or what the KV memory holds, with a
        warning that names both.
        """
        assert (512, []) == tuple(map(planned().get, ("max_model_len", "warnings")))
        plan = planned("--max-num-blocks=3")
        (warning,) = plan["warnings"]
        assert 48 == plan["max_model_len"]
        assert "max_model_len is 48, the tokens that the KV memory holds, instead of 512" in warning
        assert "raise max_num_blocks (3, --max-num-blocks)" in warning

    def test_default_holds_what_all_sequences_of_a_step_can_use(self, planned):
        """
        A small model takes no more memory than max_batch_size requests of max_model_len need.
        """
        plan = planned("--max-batch-size=3")
        assert 3 * 512 // 16 == plan["num_blocks"]
        assert "default: max_batch_size 3 requests of max_model_len 512" == plan["sized_by_place"]

    def test_file_may_have_the_schedulers_keys(self, dry_run, planned, tmp_path):
        """
        Keys of the scheduler in a file for both services change nothing; misspelt, they end the run.
        """
        file = tmp_path / "both.json"
        file.write_text('{"frontends": 2, "lost_after_s": 9.5, "max_num_blocks": 40}')
        plan = planned("--config", str(file))
        assert (40, f"{file}: max_num_blocks") == (plan["num_blocks"], plan["sized_by_place"])
        file.write_text('{"lost_after": 9.5}')
        expected = (
            f"INVALID_CONFIG: {file}: lost_after: unknown key 'lost_after'; did you mean "
            "'lost_after_s'?\n"
        )
        assert (2, "", expected) == dry_run("--config", str(file))


class TestRefusals:
    def test_each_mistake_has_its_text_and_ends_2(self, dry_run, planned):
        """
        A dry run refuses what a start would refuse, with the same text and exit code 2.
        """
        plan = planned()
        fixed = plan["weight_bytes"] + plan["activation_bytes"]
        few = (fixed + 4.5 * plan["kv_bytes_per_block"]) / plan["total_bytes"]
        for flag, text in {
            "--gpu-memory-utilization=1.0": "Free memory on device (",
            "--gpu-memory-utilization=1e-9": "No available memory for the cache blocks. ",
            f"--gpu-memory-utilization={few}": "To serve at least one request with the model's max",
            "--mem-fraction-static=1e-9": "Not enough memory. Please try to increase --mem-frac",
            "--buffer-size-gb=1e6": "",
        }.items():
            code, output, errors = dry_run(flag, "--max-model-len=512")
            assert (2, "") == (code, output)
            assert errors.startswith(f"OUT_OF_MEMORY: {text}")
            assert flag.partition("=")[0] in errors
            assert errors.count("\n") == 1

    def test_weights_are_looked_for_but_not_loaded(self, dry_run, model_dir, tmp_path, monkeypatch):
        """
        A model directory without weights is refused, and so are weights for which there is no memory.
        """
        (tmp_path / "config.json").write_bytes((model_dir / "config.json").read_bytes())
        code, output, errors = dry_run(f"--model={tmp_path}")
        assert (2, "") == (code, output)
        assert errors.startswith("INVALID_MODEL: ")
        monkeypatch.setattr(loader, "available_bytes", lambda _device: 1000)
        code, output, errors = dry_run()
        assert (2, "") == (code, output)
        assert errors.startswith(f"OUT_OF_MEMORY: the weights of {model_dir} need ")

    def test_limits_are_checked_first(self, dry_run):
        """
        A broken limit is refused as at a start.
        """
        code, output, errors = dry_run("--block-size=0")
        assert (2, "") == (code, output)
        assert "INVALID_CONFIG: block_size must be greater than 0\n" == errors
