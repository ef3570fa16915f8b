"""`tandem config reference`: all options of both services on one page."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tandem.settings.options import FILE, options_of
from tandem_client.cli.app import app


@pytest.fixture(scope="module")
def page():
    result = CliRunner().invoke(app, ["config", "reference"])
    assert 0 == result.exit_code
    return result.stdout


class TestPage:
    @pytest.mark.parametrize("service", ["scheduler", "executor"])
    def test_every_option_has_one_entry(self, page, service):
        """
        Each option of a service has one line in its chapter, with all names, default and text.
        """
        chapter = page.split(f"## `python -m {service}_svc`")[1].split("\n## ")[0]
        entries = [line for line in chapter.splitlines() if line.startswith("- ")]
        options = options_of(service)
        assert len(options) == len(entries)
        for option, entry in zip(options, entries, strict=True):
            for name in (option.name, *option.aliases):
                assert f"`--{name.replace('_', '-')}" in entry
            assert option.help in entry
            assert option.default is None or entry.endswith(f" Default: `{option.default}`.")

    def test_entry_is_whole(self, page):
        """
        An entry names the flags with their value, the variable, the purpose and the default.
        """
        assert (
            "- `--max-total-tokens INT`, `--max-num-batched-tokens`, `TANDEM_MAX_TOTAL_TOKENS`: "
            "most tokens computed in one step. Default: `4096`.\n"
        ) in page
        assert "- `--take-over`, `--no-take-over`, `TANDEM_TAKE_OVER`: " in page

    def test_json_is_the_table(self):
        """
        With --json the page is the table itself.
        """
        result = CliRunner().invoke(app, ["config", "reference", "--json"])
        assert json.loads(FILE.read_text()) == json.loads(result.stdout)
