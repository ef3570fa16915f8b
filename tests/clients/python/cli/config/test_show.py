"""`tandem config show`: effective values with their sources, of files and of running servers."""

from __future__ import annotations

import json

import pytest


class TestConfig:
    def test_file_environment_and_flags_are_shown_with_their_sources(
        self, run, tmp_path, monkeypatch
    ):
        """
        Every effective value is listed with where it came from.
        """
        file = tmp_path / "config.json"
        file.write_text('{"max_num_seqs": 9}')
        monkeypatch.setenv("TANDEM_MAX_BATCH_SIZE", "7")
        result = run("config", str(file), "--arg=--window=2", "--json")
        shown = {
            s["name"]: (s["value"], s["source"]) for s in json.loads(result.stdout)["settings"]
        }

        assert (9, "file") == shown["max_num_seqs"]
        assert (7, "environment") == shown["max_batch_size"]
        assert (2, "flag") == shown["window"]
        assert (16, "default") == shown["block_size"]

    @pytest.mark.slow
    def test_presets_are_named_and_shown(self, run):
        """
        The presets stand below the settings; with --preset their values are shown as its own.
        """
        result = run("config", "--preset", "low-latency")

        assert "presets: low-latency, high-throughput, memory-constrained, long-co" in result.stdout
        shown = json.loads(run("config", "show", "--preset=low-latency", "--json").stdout)
        assert {"name": "max_batch_size", "value": 8, "source": "preset"} in shown["settings"]
        assert 4096 == shown["presets"]["high-throughput"]["max_num_blocks"]

    def test_violated_rule_is_shown_in_its_exact_words(self, run, tmp_path):
        """
        A wrong value ends with exit code 2 and the rule's exact text.
        """
        file = tmp_path / "config.json"
        file.write_text('{"block_size": 0}')
        result = run("config", str(file))

        assert 2 == result.exit_code
        assert "tandem: INVALID_CONFIG: block_size must be greater than 0\n" == result.stderr

    def test_settings_of_a_running_server_come_from_it(self, run, server):
        """
        --live lists what the running server says.
        """
        result = run("config", "--live", server.address, "--json")

        assert {"name": "block_size", "value": 16, "source": "default"} in json.loads(
            result.stdout
        )["settings"]
