"""The README's Python code runs as it stands, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.clients.python.fake_server import ANSWER

README = Path(__file__).resolve().parents[3] / "README.md"


def _is_there(page: Path, target: str) -> bool:
    """Return whether a link of a page leads to a file, and to a heading where it names one."""
    path, _, anchor = target.partition("#")
    file = page.parent / path if path else page
    if not file.is_file():
        return False
    headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}
    return not anchor or anchor in anchors


class TestReadme:
    def test_python_example_prints_stream_and_completion(self, server, capsys):
        """
        The example streams an answer and prints a completion with reason and usage.
        """
        examples = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
        (example,) = (one for one in examples if '"127.0.0.1:50051"' in one)
        exec(compile(example.replace("127.0.0.1:50051", server.address), "README.md", "exec"), {})

        assert capsys.readouterr().out.startswith(f"{ANSWER}\n{ANSWER} EOS Usage(")
        assert 64 == server.seen.generate[0].stopping.max_tokens

    @pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
    def test_links_lead_to_what_is_there(self, name):
        """
        Each link of the README and of CONTRIBUTING leads to a file and, if it names one, a heading.
        """
        page = README.parent / name
        targets = re.findall(r"\]\(([^)]+)\)", page.read_text())
        assert targets
        assert [] == [target for target in targets if not _is_there(page, target)]
