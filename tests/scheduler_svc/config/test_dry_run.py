import json

import pytest

from scheduler_svc import run as scheduler
from scheduler_svc.service.service import Service
from tandem.process.process_start import run_or_refuse


@pytest.fixture
def dry_run(capsys, monkeypatch):
    """Return a function that makes a dry run; starting the service fails the test."""
    monkeypatch.setattr(Service, "run", lambda _self: pytest.fail("the service was started"))

    def run(*flags: str) -> tuple[int, str, str]:
        code = run_or_refuse(lambda: scheduler.run(["--dry-run", *flags]))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


class TestDryRun:
    def test_limits_are_named_with_whether_they_are_final(self, dry_run):
        """A dry run names each limit and whether the executor may change it, and ends 0."""
        code, output, errors = dry_run("--max-num-blocks=100", "--max-model-len=160")
        assert (0, "") == (code, errors)
        assert "  block_size = 16 (or the executor's)\n" in output
        assert "  max_num_blocks = 100 (flag)\n" in output
        assert "  max_num_seqs = 256 (default)\n" in output
        assert "holds 1600 tokens;\nthese are 10 of the longest requests;\n" in output
        assert "no prompt is admitted while 90 blocks or more are in use\n" in output

    def test_what_only_the_executor_knows_is_not_guessed(self, dry_run):
        """
        A limit of blocks or length that is not set is shown as the executor's, without a forecast.
        """
        output = dry_run()[1]
        assert "  max_num_blocks = the executor's\n" in output
        assert "  max_model_len = the executor's\n" in output
        assert "holds" not in output

    def test_json_is_one_object(self, dry_run):
        """A forecast with JSON logs is one object, with a preset's limits as upper bounds."""
        code, output, _ = dry_run("--log-format=json", "--preset=low-latency")
        found = json.loads(output)
        assert (0, 1) == (code, output.count("\n"))
        assert ["preset"] * 7 == [limit["source"] for limit in found["limits"]]
        assert not any(limit["follows_executor"] for limit in found["limits"])
        assert (512 * 16, 8) == (found["tokens"], found["longest_requests"])

    def test_unusual_settings_are_warned_of(self, dry_run):
        """A warning of the start is part of the forecast."""
        assert "warning: block_size 24 is unusual" in dry_run("--block-size=24")[1]

    def test_file_may_have_the_executors_keys(self, dry_run, tmp_path):
        """
        Keys of the executor in a file for both services change nothing; misspelt, they end the run.
        """
        file = tmp_path / "both.json"
        file.write_text('{"model": "some/dir", "num_threads": 2, "max_num_blocks": 100}')
        code, output, errors = dry_run("--config", str(file))
        assert (0, "") == (code, errors)
        assert "  max_num_blocks = 100 (file)\n" in output
        file.write_text('{"num_thread": 2}')
        expected = (
            f"INVALID_CONFIG: {file}: num_thread: unknown key 'num_thread'; did you mean "
            "'num_threads'?\n"
        )
        assert (2, "", expected) == dry_run("--config", str(file))

    def test_mistakes_end_as_at_a_start(self, dry_run):
        """A broken rule is refused with its text and exit code 2."""
        expected = "INVALID_CONFIG: max_total_tokens must be at least max_batch_size\n"
        assert (2, "", expected) == dry_run("--max-total-tokens=31")
