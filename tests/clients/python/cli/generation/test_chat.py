"""`tandem chat`: turns, commands, messages of several lines."""

from __future__ import annotations

import json
import signal

import pytest

from tandem.errors import PromptTooLong
from tandem_client import GenerateOptions
from tandem_client.cli.generation.chat_commands import (
    Conversation,
    Message,
    read_message,
    run_command,
)
from tests.clients.python.fake_server import ANSWER, PATIENCE_S, Act


class TestChat:
    def test_history_goes_with_every_turn(self, run, server):
        """
        Each turn is sent with all turns before it, the system's first; end of input leaves with 0.
        """
        result = run(
            "chat", "--system", "be brief", "--address", server.address, stdin="one\ntwo\n"
        )
        turns = [(m.role, m.content) for m in server.seen.generate[1].chat.messages]

        assert 0 == result.exit_code
        assert [
            ("system", "be brief"),
            ("user", "one"),
            ("assistant", ANSWER),
            ("user", "two"),
        ] == turns
        assert 2 == result.stdout.count(ANSWER)

    def test_reset_forgets_all_but_the_instructions(self, run, server):
        """
        /reset drops the turns so far and sends nothing itself.
        """
        run("chat", "--system", "x", "--address", server.address, stdin="one\n/reset\n\ntwo\n")

        assert [1, 1] == [len(r.chat.messages) - 1 for r in server.seen.generate]

    def test_refused_turn_leaves_the_conversation_as_it_was(self, run, server):
        """
        After a refused turn the conversation goes on without it.
        """
        server.play(Act(accept=False, error=PromptTooLong("too long")), Act())
        result = run("chat", "--address", server.address, stdin="one\ntwo\n")

        assert "PROMPT_TOO_LONG: too long" in result.stderr
        assert ["two"] == [m.content for m in server.seen.generate[1].chat.messages]

    def test_conversation_that_outgrew_the_context_is_told_the_way_out(self, run, server):
        """
        The error names /clear if earlier turns fill the context, and not if there are none.
        """
        too_long = Act(accept=False, error=PromptTooLong("too long"))
        server.play(too_long, Act(), too_long)
        result = run("chat", "--address", server.address, stdin="one\ntwo\nthree\n")

        assert 2 == result.stderr.count("PROMPT_TOO_LONG")
        assert 1 == result.stderr.count("/clear forgets the conversation so far")

    def test_ctrl_c_stops_the_answer_only(self, tandem, server):
        """
        Ctrl-C ends the running answer, keeps what was said, and the conversation goes on.
        """
        server.play(Act(num_tokens=5, hang=True), Act())
        process = tandem("chat", "--address", server.address)
        process.stdin.write("one\n")
        process.stdin.flush()
        heard = ""
        while ANSWER[:5] not in heard:
            heard += process.stdout.read(1)
        assert server.seen.hanging.wait(PATIENCE_S)
        process.send_signal(signal.SIGINT)
        assert server.seen.cancelled.wait(PATIENCE_S)
        output, _ = process.communicate("two\n", timeout=PATIENCE_S)

        assert 0 == process.returncode
        assert ANSWER in output
        assert ANSWER[:5] == server.seen.generate[1].chat.messages[1].content

    def test_command_is_obeyed_and_not_sent(self, run, server, tmp_path):
        """
        Commands change instructions and options of the turns that follow, save them, and leave.
        """
        file = tmp_path / "talk.json"
        lines = [
            "one", "/system be brief", "/set temperature 0.5", "/set top-k 3", "two",
            f"/save {file}", "/clear", "/set temperature default", "/exit", "three",
        ]  # fmt: skip
        result = run("chat", "--address", server.address, stdin="\n".join(lines))
        one, two = server.seen.generate

        assert 0 == result.exit_code
        assert not one.sampling.HasField("temperature")
        assert (0.5, 3) == (two.sampling.temperature, two.sampling.top_k)
        assert [
            ("system", "be brief"),
            ("user", "one"),
            ("assistant", ANSWER),
            ("user", "two"),
        ] == [(m.role, m.content) for m in two.chat.messages]
        assert ["system", "user", "assistant", "user", "assistant"] == [
            one["role"] for one in json.loads(file.read_text())["messages"]
        ]

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("/hepl", "there is no command /hepl: did you mean /help?"),
            ("/etc/passwd", "there is no command /etc/passwd: /help lists all. To"),
            ("/set temprature 1", "there is no option temprature: did you mean temperature?"),
            ("/set preset poetry", "there is no preset 'poetry': there are code, summary, chat"),
            ("/set max_tokens many", "max_tokens must be a whole number or default, not 'many'"),
            ("/save", "say where: /save FILE"),
            ("/save /nowhere/x", "/nowhere/x: No such file or directory"),
        ],
    )
    def test_wrong_command_is_told_and_not_sent(self, run, server, line, words):
        """
        A command that does not exist or makes no sense is told what to type, and the conversation goes on.
        """
        result = run("chat", "--address", server.address, stdin=f"{line}\nhi\n")

        assert (0, 1) == (result.exit_code, len(server.seen.generate))
        assert words in result.stderr


class TestMessages:
    @pytest.mark.parametrize(
        ("lines", "expected"),
        [
            ([" hi "], Message("hi", is_command=False)),
            (["/help me"], Message("/help me", is_command=True)),
            (["//etc is a folder"], Message("/etc is a folder", is_command=False)),
            (["a\\", "b\\", "c"], Message("a\nb\nc", is_command=False)),
            (['"""', "def f():", "  /x", '"""'], Message("def f():\n  /x", is_command=False)),
            (['"""a', ' b"""'], Message("a\n b", is_command=False)),
            (["a\\"], Message("a", is_command=False)),
        ],
        ids=["line", "command", "escaped", "backslashes", "fence", "fence-in-text", "input-ends"],
    )
    def test_message_is_read_to_its_end(self, lines, expected):
        """
        A message is a line, several that end with a backslash, or what stands between quotation marks.
        """
        rest = list(lines)

        def ask(_prompt):
            if not rest:
                raise EOFError
            return rest.pop(0)

        assert expected == read_message(ask)
        assert [] == rest

    def test_instructions_can_be_taken_back(self):
        """
        /system with empty quotation marks leaves no instructions; without a text it shows them.
        """
        conversation = Conversation(system="x", options=GenerateOptions())

        assert "the instructions are: x" == run_command("/system", conversation)
        assert "there are no instructions" == run_command('/system ""', conversation)
        assert [{"role": "user", "content": "hi"}] == conversation.messages_with("hi")

    def test_instructions_keep_their_quotation_marks(self):
        """
        /system takes its text as it is, quotation marks at either end included.
        """
        conversation = Conversation(system=None, options=GenerateOptions())

        assert 'the instructions are: answer "no"' == run_command(
            '/system answer "no"', conversation
        )

    def test_options_that_are_set_are_shown(self):
        """
        /set alone lists what is set, a preset too, and setting temperature beside top_p gives a hint.
        """
        conversation = Conversation(system=None, options=GenerateOptions(seed=7))

        assert run_command("/set", conversation).startswith("seed 7; all else is the server")
        assert "preset is code" == run_command("/set preset code", conversation)
        assert "temperature is 0.5" == run_command("/set temperature 0.5", conversation)
        assert "change one of them" in run_command("/set top_p 0.5", conversation)
        assert run_command("/set", conversation).startswith("preset code, temperature 0.5, top_p")
