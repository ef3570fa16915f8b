"""`tandem generate --token-ids`: prompts without text, and outputs of models without a tokenizer."""

from __future__ import annotations

import json

import pytest

from tests.clients.python.fake_server import ANSWER

IDS = " ".join(str(ord(character)) for character in ANSWER)


class TestTokenIds:
    def test_they_stand_instead_of_a_prompt(self, run, server):
        """
        The ids are sent as they are given, and the output of a model with a tokenizer is its text.
        """
        result = run("generate", "--token-ids", "1, 2,3", "--address", server.address)
        (sent,) = server.seen.generate

        assert ([1, 2, 3], "token_ids") == (list(sent.token_ids.ids), sent.WhichOneof("prompt"))
        assert (0, f"{ANSWER}\n") == (result.exit_code, result.stdout)

    def test_output_without_text_is_its_ids(self, run, server):
        """
        Without a tokenizer the output is printed as ids with spaces between them, each choice too.
        """
        server.seen.token_ids_only = True
        command = ("generate", "--token-ids", "1", "--address", server.address)
        assert f"{IDS}\n" == run(*command).stdout
        assert f"--- choice 0, STOP_STRING\n{IDS}\n" in run(*command, "--n", "2").stdout

    def test_json_has_ids_and_no_text_of_ours(self, run, server):
        """
        --json is what the server sent, whatever the model has.
        """
        server.seen.token_ids_only = True
        result = run("generate", "--token-ids", "1", "--json", "--address", server.address)
        assert ANSWER == json.loads(result.stdout)["text"]

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["--token-ids", "1,x"], "--token-ids takes whole numbers with commas between them"),
            (["--token-ids", ""], "--token-ids takes whole numbers with commas between them"),
            (["--token-ids", "1", "hi"], "--token-ids stands instead of a prompt"),
            (["--token-ids", "1", "--chat"], "--token-ids stands instead of a prompt"),
            (["--token-ids", "1", "--echo"], "--token-ids stands instead of a prompt"),
        ],
        ids=["word", "none", "prompt", "chat", "echo"],
    )
    def test_wrong_use_is_refused(self, run, server, arguments, sentence):
        """
        A wrong list of ids, or a prompt beside a list, is a usage error, and nothing is sent.
        """
        result = run("generate", *arguments, "--address", server.address)
        assert (2, []) == (result.exit_code, server.seen.generate)
        assert sentence in result.stderr
