"""`tandem tokenize` and `tandem detokenize` against a fake server, whose ids are code points."""

from __future__ import annotations

import json

import pytest

from tests.clients.python.fake_server import PATIENCE_S


class TestTokenize:
    def test_ids_are_one_line_as_other_commands_take_them(self, run, server):
        """
        The ids of a text come with commas between them, and `detokenize` gives the text back.
        """
        ids = run("tokenize", "hi", "--address", server.address)
        assert (0, "104,105\n", "") == (ids.exit_code, ids.stdout, ids.stderr)
        text = run("detokenize", ids.stdout.strip(), "--address", server.address)
        assert (0, "hi\n", "") == (text.exit_code, text.stdout, text.stderr)

    @pytest.mark.parametrize(
        ("arguments", "stdin", "expected"),
        [([], "hi\n", "104,105,10"), (["-"], "h", "104"), (["a", "-"], "b", "97,10,10,98")],
        ids=["none", "dash", "both"],
    )
    def test_text_is_read_from_stdin(self, run, server, arguments, stdin, expected):
        """
        Without a text, and for -, stdin is tokenized as it stands, line ends too.
        """
        result = run("tokenize", *arguments, "--address", server.address, stdin=stdin)
        assert (0, f"{expected}\n") == (result.exit_code, result.stdout)

    def test_empty_text_is_asked_for(self, run, server):
        """
        An empty text is a text: the server's ids are printed, here none.
        """
        result = run("tokenize", "", "--address", server.address)
        assert (0, "\n", 1) == (result.exit_code, result.stdout, len(server.seen.tokenized))

    def test_texts_are_a_line_per_token(self, run, server):
        """
        --texts prints each id with its text as JSON writes it.
        """
        result = run("tokenize", 'a"', "--texts", "--address", server.address)
        assert '      97  "a"\n      34  "\\""\n' == result.stdout

    def test_json_is_one_object(self, run, server):
        """
        --json prints the answer: ids, texts where asked for, and the length of the context.
        """
        command = ("tokenize", "hi", "--json", "--address", server.address)
        bare = {"token_ids": [104, 105], "texts": [], "max_model_len": 512}
        assert bare == json.loads(run(*command).stdout)
        assert ["h", "i"] == json.loads(run(*command, "--texts").stdout)["texts"]

    def test_chats_go_through_the_template(self, run, server, tmp_path):
        """
        --chat sends the text as a user message, and --messages a file's conversation.
        """
        path = tmp_path / "messages.json"
        path.write_text(json.dumps([{"role": "system", "content": "a"}]))
        run("tokenize", "hi", "--chat", "--address", server.address)
        run("tokenize", "--messages", str(path), "--address", server.address)
        assert [[("user", "hi")], [("system", "a")]] == [
            [(message.role, message.content) for message in one.chat.messages]
            for one in server.seen.tokenized
        ]

    def test_options_reach_the_server(self, run, server):
        """
        Each option is sent as the field of its name; without options nothing is set.
        """
        flags = ["--model", "fake", "--parse-special-tokens", "--texts", "--api-key", "sesame"]
        run("tokenize", "hi", *flags, "--address", server.address)
        run("tokenize", "hi", "--address", server.address)
        sent, bare = server.seen.tokenized
        assert ("fake", True, True) == (sent.model, sent.parse_special_tokens, sent.with_texts)
        assert ["text"] == [field.name for field, _ in bare.ListFields()]
        assert "Bearer sesame" == server.seen.metadata[0]["authorization"]

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["hi", "there"], 'give one prompt, in quotation marks: tandem tokenize "..."'),
            (["hi", "--messages", "f"], "--messages stands instead of a text and --chat"),
            (["hi", "--chat", "--parse-special-tokens"], "--parse-special-tokens is for a text"),
            (["--messages", "/none/f"], "/none/f: No such file or directory"),
        ],
        ids=["two", "messages", "special", "file"],
    )
    def test_wrong_use_is_refused_in_a_line(self, run, server, arguments, sentence):
        """
        Wrong usage is one line and exit code 2, and nothing is sent.
        """
        result = run("tokenize", *arguments, "--address", server.address)
        assert (2, []) == (result.exit_code, server.seen.tokenized)
        assert (1, True) == (result.stderr.count("\n"), sentence in result.stderr)


class TestDetokenize:
    @pytest.mark.parametrize(
        ("arguments", "stdin"),
        [
            (["104,105"], ""),
            (["104, 105"], ""),
            (["104", "105"], ""),
            ([], "104\n105\n"),
            (["-"], "104,105\n"),
        ],
        ids=["commas", "both", "words", "stdin", "dash"],
    )
    def test_ids_come_with_commas_or_spaces(self, run, server, arguments, stdin):
        """
        Ids are arguments or stdin, with commas, spaces or line ends between them.
        """
        result = run("detokenize", *arguments, "--address", server.address, stdin=stdin)
        assert (0, "hi\n") == (result.exit_code, result.stdout)
        assert [104, 105] == list(server.seen.detokenized[0].token_ids)

    def test_json_is_one_object(self, run, server):
        """
        --json prints the text as JSON writes it.
        """
        result = run("detokenize", "10,34", "--json", "--address", server.address)
        assert {"text": '\n"'} == json.loads(result.stdout)

    def test_options_reach_the_server(self, run, server):
        """
        Special tokens and the name of the model are asked for only where the user says so.
        """
        flags = ["--keep-special-tokens", "--model", "fake"]
        run("detokenize", "104", *flags, "--address", server.address)
        run("detokenize", "104", "--address", server.address)
        sent, bare = server.seen.detokenized
        assert ("fake", True) == (sent.model, sent.keep_special_tokens)
        assert ["token_ids"] == [field.name for field, _ in bare.ListFields()]

    def test_word_that_is_no_id_is_wrong_usage(self, run, server):
        """
        A word is refused in one line that repeats it, cut to what a line holds.
        """
        result = run("detokenize", "1,x", "--address", server.address)
        assert (2, []) == (result.exit_code, server.seen.detokenized)
        line = "tandem: token ids are whole numbers with commas or spaces between them, got '1,x'\n"
        assert line == result.stderr
        long = run("detokenize", "x" * 1000, "--address", server.address)
        assert len(long.stderr) < 200

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            (["999"], "INVALID_PARAMETER: an id is out of the vocabulary"),
            ([str(2**40)], "INVALID_PARAMETER: token_ids"),
            (["1", "--model", "other"], "MODEL_NOT_FOUND: no model 'other' is served"),
        ],
        ids=["vocabulary", "size", "model"],
    )
    def test_refusal_is_a_line_and_exit_code_4(self, run, server, arguments, reason):
        """
        A refusal by the server, and an id that no message can hold, are one line with the reason.
        """
        result = run("detokenize", *arguments, "--address", server.address)
        assert (4, 1) == (result.exit_code, result.stderr.count("\n"))
        assert reason in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["tokenize", "detokenize"])
def test_server_that_is_not_there_is_an_error(tandem, command):
    """
    Without a server the command ends with the exit code for that.
    """
    process = tandem(command, "1", "--address", "127.0.0.1:1")
    _, said = process.communicate(timeout=PATIENCE_S)
    assert (3, True) == (process.returncode, "cannot reach 127.0.0.1:1" in said)
