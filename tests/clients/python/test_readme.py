"""The README's Python code runs as it stands, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

from tests.clients.python.fake_server import ANSWER

README = Path(__file__).resolve().parents[3] / "README.md"


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

    def test_links_lead_to_what_is_there(self):
        """
        Each link of the README leads to a file of the repository or to a heading of the page.
        """
        page = README.read_text()
        headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
        anchors = {f"#{heading.lower().replace(' ', '-').replace(',', '')}" for heading in headings}
        targets = re.findall(r"\]\(([^)]+)\)", page)
        assert targets
        missing = [
            target
            for target in targets
            if target not in anchors and not (README.parent / target).is_file()
        ]
        assert [] == missing
