"""Python code of READMEs runs as it stands, and links of the pages lead somewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import grpc
import pytest

from tandem.errors import Draining, PoisonRequest
from tandem.inference.v1 import inference_service_pb2 as inference
from tandem.inference.v1 import inference_service_pb2_grpc as inference_grpc
from tests.architecture.test_sizes import ROOT, tracked
from tests.clients.python.fake_server import ANSWER, Act

README = Path(__file__).resolve().parents[3] / "README.md"


PROTOS_README = README.parent / "protos" / "README.md"
CLIENT_README = README.parent / "clients" / "python" / "README.md"
EMBEDDED_README = README.parent / "clients" / "embedded" / "README.md"


def _examples(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def _run_whole_client(name: str) -> dict[str, object]:
    """Run `client.py` of the protos' README under a module's name, and return what it defines."""
    (example,) = _examples(PROTOS_README)
    defined: dict[str, object] = {"__name__": name}
    exec(compile(example, "protos/README.md", "exec"), defined)
    return defined


def _breaking(*lengths: int) -> list[Act]:
    """Make calls that break when the client has so many tokens."""
    return [Act(num_tokens=n, error=Draining("bye", retry_after_s=0.0)) for n in lengths]


def _targets(page: Path) -> list[str]:
    """Return where the links and pictures of a page lead, other sites left out."""
    targets = re.findall(r"\]\(([^)]+)\)", page.read_text())
    return [target for target in targets if "://" not in target]


def _is_there(page: Path, target: str) -> bool:
    """Return whether a link leads to a file or folder, and to a heading where it names one."""
    path, _, anchor = target.partition("#")
    file = page.parent / path if path else page
    if not anchor:
        return file.exists()
    if not file.is_file():
        return False
    headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}
    return anchor in anchors


class TestReadme:
    def test_python_example_prints_stream_and_completion(self, server, capsys):
        """
        The example streams an answer and prints a completion with reason and usage.
        """
        (example,) = (one for one in _examples(README) if '"127.0.0.1:50051"' in one)
        exec(compile(example.replace("127.0.0.1:50051", server.address), "README.md", "exec"), {})

        assert capsys.readouterr().out.startswith(f"{ANSWER}\n{ANSWER} EOS Usage(")
        assert 64 == server.seen.generate[0].stopping.max_tokens

    def test_example_of_the_client_prints_choices_and_statistics(self, server, capsys):
        """
        The example of the client's page prints the text and end of each choice, and a statistic.
        """
        example = _examples(CLIENT_README)[0]
        for address in ("127.0.0.1:50051", "127.0.0.1:50052"):
            example = example.replace(address, server.address)
        exec(compile(example, "clients/python/README.md", "exec"), {})

        *printed, statistic = capsys.readouterr().out.splitlines()
        assert ["0 STOP_STRING", "1 STOP_STRING"] == printed[-2:]
        assert statistic.isdecimal()
        assert 2 == server.seen.generate[0].n

    @pytest.mark.parametrize("number", range(1, len(_examples(CLIENT_README))))
    def test_other_examples_of_the_client_print_the_answer(self, server, capsys, number):
        """
        Each further example of the client's page runs as it stands and prints an answer.
        """
        example = _examples(CLIENT_README)[number].replace("127.0.0.1:50051", server.address)
        exec(compile(example, "clients/python/README.md", "exec"), {})
        assert ANSWER in capsys.readouterr().out

    @pytest.mark.slow
    @pytest.mark.parametrize("number", range(len(_examples(EMBEDDED_README))))
    def test_examples_of_the_embedded_engine_print_what_it_computes(
        self, number, capsys, monkeypatch
    ):
        """
        Each example of the embedded engine's page runs from the root and prints its results.
        """
        monkeypatch.chdir(ROOT)
        example = _examples(EMBEDDED_README)[number]
        exec(compile(example, "clients/embedded/README.md", "exec"), {})
        assert capsys.readouterr().out.strip()

    @pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
    def test_pages_at_the_root_lead_further(self, name):
        """
        The README and CONTRIBUTING have links.
        """
        assert _targets(README.parent / name)

    def test_links_lead_to_what_is_there(self):
        """
        Each link of a README and of CONTRIBUTING leads to a file or folder and, if it names one, to
        a heading.
        """
        pages = tracked("*README.md", "CONTRIBUTING.md")
        dead = [
            f"{page.relative_to(ROOT)}: {target}"
            for page in pages
            for target in _targets(page)
            if not _is_there(page, target)
        ]
        assert [] == dead


class TestWholeClient:
    def test_program_prints_a_stream_that_breaks_as_if_it_had_not(
        self, server, capsys, monkeypatch
    ):
        """
        The program of the protos' README prints the whole text once, over a stream that breaks
        twice.
        """
        server.play(*_breaking(3, 9), Act())
        monkeypatch.setattr(sys, "argv", ["client.py", server.address, "hi"])
        _run_whole_client("__main__")
        assert f"{ANSWER}\n" == capsys.readouterr().out
        held = [
            [len(one.token_ids) for one in seen.resume.choices] for seen in server.seen.generate
        ]
        assert [[], [3], [9]] == held
        keys = {seen.attempt_key for seen in server.seen.generate}
        assert (1, 32) == (len(keys), len(keys.pop()))

    def test_two_choices_come_whole_with_the_end_of_the_request(self, server):
        """
        Each of two choices comes whole where the stream breaks after the first of them ended, and
        the last event is returned.
        """
        server.play(*_breaking(len(ANSWER) + 1), Act())
        texts = {0: "", 1: ""}
        with grpc.insecure_channel(server.address) as channel:
            stub = inference_grpc.InferenceServiceStub(channel)
            request = inference.GenerateRequest(text="hi", n=2)
            pieces = _run_whole_client("client")["generate"](stub, request)
            try:
                while True:
                    choice, text = next(pieces)
                    texts[choice] += text
            except StopIteration as end:
                done = end.value
        assert {0: ANSWER, 1: f"{ANSWER.upper()}1"} == texts
        assert 3 == done.usage.prompt_tokens

    def test_final_error_is_raised_with_its_reason(self, server):
        """
        An error without advice to retry ends the program with its reason, after one call.
        """
        server.play(Act(accept=False, error=PoisonRequest("it kills executors")))
        with grpc.insecure_channel(server.address) as channel:
            stub = inference_grpc.InferenceServiceStub(channel)
            request = inference.GenerateRequest(text="hi")
            with pytest.raises(RuntimeError, match="POISON_REQUEST: it kills executors"):
                list(_run_whole_client("client")["generate"](stub, request))
        assert 1 == len(server.seen.generate)
